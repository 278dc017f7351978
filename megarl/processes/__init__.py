"""Worker processes beside a rank for user code, which may hang, crash, or be killed.

They end with the rank, and everything that they have started ends with them. Imports `config/` only.
"""
