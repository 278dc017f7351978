"""Numbers of ranks that do not fit together, or not the model."""

from case import Case

CASES = [
    Case("tp beyond the world", ("parallel.world_size=1", "tp x pp", "2"), ("parallel.tp=2",)),
    Case("ep without a divisor", ("parallel.ep=3", "possible"), ("parallel.world_size=2", "parallel.ep=3")),
    Case("no ranks", ("parallel.world_size", "at least 1"), ("parallel.world_size=0",)),
]
