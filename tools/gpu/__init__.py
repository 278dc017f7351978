"""Checks for a machine with an NVIDIA GPU, for `gpu_check.py`; `README.md` explains how to add a row."""
