"""Pure tensor functions over packed `[T]` tensors: token rewards, advantages, losses, KL. The alignment is that of
`types/`.

No devices, ranks or process groups here: imports torch, `types/` and the ranges of `strict`, and is imported by
controllers and workers. `README.md` lists them, with their papers.
"""
