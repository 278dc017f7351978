"""Rollouts: SGLang engines, the multi-turn loop, tools and chat templates.

May import models, data, parallel, config and types, and the hash and copies of reshard. A rank imports no SGLang on a
CPU; `engine/engine_host.py`, `engine/engine_server.py`, `engine/weight_loader.py`, `cpu/sglang_plugin.py`,
`cpu_stubs/` and one end of `engine/weight_channel.py` run in the engine's processes.
"""
