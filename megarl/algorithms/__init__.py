"""Pure tensor functions over packed `[T]` tensors: token rewards, advantages, losses, KL. The alignment is that of
`types/`.

No devices, ranks or process groups here: imports torch and `types/`, and is imported by controllers and workers.
"""
