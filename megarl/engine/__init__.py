"""SGLang engines: arguments, processes, HTTP client, tool-call parsers, weight loading and restart.

`engine_host.py`, `engine_server.py`, `weight_loader.py` and the engine side of `weight_channel.py` run in SGLang's
processes. On a CPU a rank never imports SGLang itself.
"""
