"""The pure half of the reshard: layouts, what moves where, in which rounds, and at what cost.

In the order of the computation: `layout.py`, `cells.py`, `assignment.py`, `planner.py`. `from_config.py` does all of it
for a configuration; `engine_settings.py` and the checks in `layout.py` define what is refused. `bound.py` computes, by
separate code, the lower bound that no plan can beat; `cost_report.py` presents a plan.
"""
