"""Triton kernels for CUDA. Nothing here is imported unless a model runs there; tests run them through the interpreter."""
