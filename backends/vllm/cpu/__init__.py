"""NVFP4 kernels for a vLLM on CPUs, which ships none; imported in its workers only."""
