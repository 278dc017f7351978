"""Sandbox for code written by the policy: programs, tests of programs, and interpreter sessions. See `README.md`.

`box.py` is the API: `Sandbox.from_environment()` works in any process of a run. `runner.py`, `spawning.py`,
`mounts.py`, `seccomp.py`, and `box_memory.py` implement the process that starts boxes. `namespace.py` prepares boxes
ahead of time. `inside_*.py` run in a box. Imports `config/` and the wire format of `processes/` only.
"""
