"""Names of what an op can be raced against. Imports nothing."""

COMPILED = "torch.compile"
# Backends of torch's scaled_dot_product_attention.
SDPA = ("sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "sdpa:math")
RIVALS = ("torch", COMPILED, *SDPA)  # the first is the usual
