"""Loops that torch has no single operation for: Triton on CUDA, Numba on the CPU. Each file is imported only where used."""
