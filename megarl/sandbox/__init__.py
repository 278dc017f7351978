"""A sandbox for code that the policy wrote: programs, tests of programs, interpreter sessions. See `README.md`.

`box.py` is the API: `Sandbox.from_environment()` works in any process of a run. `runner.py`, `spawning.py`,
`mounts.py`,
`seccomp.py`, `cgroups.py` and `memory_watch.py` are the process that starts boxes, `namespace.py` and `warm_pool.py`
prepare boxes ahead of time, and `inside_*.py` run in a box. Imports `config/` only.
"""
