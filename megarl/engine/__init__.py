"""Engines that generate: what all kinds have, and a folder for each kind.

`engine_protocol.py` has the types through which rollouts and weight syncs see an engine, `engine_backends.py` chooses
the kind. `engine_host.py` starts engines' processes, `weight_loader.py` runs in them. A rank never imports an engine.
"""
