"""Worker processes beside a rank for user code, which may hang, crash, or be killed.

They end with the rank, and everything that they have started ends with them. `messages.py` is the wire format of all of
them, and of the process that starts boxes. Imports `config/` only.
"""
