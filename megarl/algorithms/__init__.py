"""Pure tensor functions over packed `[T]` tensors: token rewards, advantages, losses, KL. The alignment is that of
`types.py`.

No devices, ranks or process groups here: imports torch and `types.py`, and is imported by controllers and workers.
"""
