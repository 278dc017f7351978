"""SGLang engines: arguments, processes, HTTP client, tool-call parsers, weight loading and restart.

`engine_protocol.py` has the types through which rollouts see an engine. `engine_host.py`, `engine_server.py` and
`weight_loader.py` run in SGLang's processes. On a CPU a rank never imports SGLang itself.
"""
