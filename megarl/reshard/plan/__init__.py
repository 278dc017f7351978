"""The pure half of the reshard, in the order of computation: `layout.py`, `cells.py`, `assignment.py`, `planner.py`.
`from_config.py` does all of it for a configuration; `bound.py` and `cost_report.py` judge a plan."""
