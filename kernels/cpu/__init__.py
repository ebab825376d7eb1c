"""Kernels for processors, compiled by Numba; the Triton kernels beside them are for GPUs. Free of imports."""
