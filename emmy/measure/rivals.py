"""Names of what an op can be raced against. Imports nothing."""

COMPILED = "torch.compile"
AUTOTUNED = "torch.compile:max-autotune"  # its mode that times templates of its own against cuBLAS
# Backends of torch's scaled_dot_product_attention.
SDPA = ("sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "sdpa:math")
RIVALS = ("torch", COMPILED, AUTOTUNED, *SDPA)  # the first is the usual
