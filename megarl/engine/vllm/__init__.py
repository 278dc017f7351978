"""vLLM as a kind of engine, on CPUs: its settings, its program and its weight loader.

Only `vllm_loader.py`, `vllm_worker.py` and `vllm_server.py` import vLLM, in processes of the environment `.venv/vllm`.
"""
