"""The SGLang engine: its arguments, process, HTTP client, tool-call parsers, weight loading and restart.

`engine_host.py`, `engine_server.py`, `weight_loader.py` and the engine's end of `weight_channel.py` run in SGLang's
processes. On a CPU a rank never imports SGLang itself.
"""
