"""Rollouts: SGLang engines, the multi-turn loop, tools and chat templates.

May import models, data, parallel, config and types, and the hash and copies of reshard. A rank imports no SGLang on a
CPU; `engine_host.py`, `engine_server.py`, `loader.py`, `cpu_plugin.py`, `cpu_stubs/` and one end of `session.py` run in
the engine's processes.
"""
