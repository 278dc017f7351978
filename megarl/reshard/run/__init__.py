"""The executing half of the reshard: transport (`executor.py`), packing, FP8 scales and checksums, with Triton
kernels."""
