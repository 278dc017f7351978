"""Processes beside a rank that run user code, which may hang, crash or be killed. They end with the rank, and
everything that they started ends with them. Imports `config/` only.
"""
