"""Names of what an op can be raced against. Imports nothing."""

COMPILED = "torch.compile"
AUTOTUNED = "torch.compile:max-autotune"  # its mode that times templates of its own against cuBLAS
# Backends of torch's scaled_dot_product_attention.
SDPA = ("sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "sdpa:math")
# Attention of a server, by the backend that calls it; of these only what runs beside the kernels matters (emmy_vllm).
SERVERS = ("vllm:TRITON_ATTN", "vllm:FLASH_ATTN", "vllm:CPU_ATTN")
RIVALS = ("torch", COMPILED, AUTOTUNED, *SDPA, *SERVERS)  # the first is the usual
