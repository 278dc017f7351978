"""Processes beside a rank that run somebody else's code, and may hang, crash or be killed: they end with the rank, and
with each ends all that it has started. May import `config/` only."""
