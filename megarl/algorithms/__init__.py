"""Pure tensor functions over packed `[T]` tensors: token rewards, advantages, losses, KL. Aligned as in `types/`.

No devices, ranks or process groups: imports torch, `types/` and `config/strict.py` only. Controllers and workers import
it. `README.md` lists the functions with their papers.
"""
