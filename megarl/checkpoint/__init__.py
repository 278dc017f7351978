"""Save and resume runs: checkpoint folders, manifests, disk space, and conversion to Hugging Face folders.

May import `reshard`, `models`, `parallel` and below; `megatron`, workers and controllers import it.
"""
