"""Sandbox for code written by the policy: programs, tests of programs, and interpreter sessions. See `README.md`.

`box.py` is the API: `Sandbox.from_environment()` works in any process of a run. `runner.py` is the process that starts
boxes, `namespace.py` prepares them ahead of time, and `inside_*.py` run in them.
"""
