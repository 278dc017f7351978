"""The tables of `bench.py`: a module per command, with `add_options` and `run`, and what they share."""
