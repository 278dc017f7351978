"""A sandbox for what a policy wrote: programs, tests of programs, sessions of an interpreter; `README.md`.

`box.py` has the API: `Sandbox.from_environment()` in any process of a run. `runner.py`, `spawning.py`, `mounts.py`,
`seccomp.py`, `cgroups.py` and `memory_watch.py` are the process that starts boxes, `namespace.py` and `warm_pool.py`
what it prepares of them ahead, `inside_*.py` what runs in them. May import `config/` only; imported by `rewards/` and
`environments/`.
"""
