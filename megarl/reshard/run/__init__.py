"""Execution of a reshard plan: transport (`executor.py`), packing, FP8 scales and checksums, with Triton kernels."""
