"""Algorithms as plain Python: one small file each, read top to bottom.

A controller says what happens in a step and knows no rank, device or process group. It calls roles of the flow
(`flow.rollout`, `flow.actor`, ...) and pure functions of `megarl.algorithms`. A new one is a class with `roles`,
`load_items` and `step`, in any package; `algorithm: module:name` is all that names it.
"""
