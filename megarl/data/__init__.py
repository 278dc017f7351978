"""Prompts in, batches out: readers, the resumable loader, and the packing of sequences into micro-batches.

May import `types/` and `config/` only; imported by anything from `megatron/` upwards.
"""
