"""The pure half of the reshard: layouts, what moves where, in which rounds, and at what cost.

In the order of the computation: `layout.py`, `flows.py`, `assignment.py`, `planner.py`. `from_config.py` does all of it
for a configuration; `checks.py` and `engine_settings.py` define what is refused. `bound.py` computes, by separate code,
the lower bound that no plan can beat; `cost_report.py` and `html_page.py` present a plan.
"""
