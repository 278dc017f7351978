"""SGLang: settings, arguments, processes, HTTP client, tool-call parsers and what the weight loader must know.

`sglang_server.py` and `sglang_loader.py` run in SGLang's processes. On a CPU a rank never imports SGLang itself.
"""
