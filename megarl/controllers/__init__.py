"""Algorithms in plain Python: one small file each, read top to bottom.

A controller defines what happens in a step. It knows no rank, device or process group: it calls roles of the flow
(`flow.rollout`, `flow.actor`, ...) and pure functions of `megarl.algorithms`. A new algorithm is a class with `roles`,
`load_items` and `step`, in any package; set `algorithm: module:name` to run it.
"""
