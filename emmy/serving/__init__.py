"""vLLM's server with a kernel pack and without: commands, processes, measurements. Imports no vLLM, which runs in processes of its own."""
