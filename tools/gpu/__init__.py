"""What is tried on a machine with an NVIDIA GPU, for `gpu_check.py`; `README.md` says how a row is made."""
