"""The reshard: the policy's weights from Megatron's shards straight into the engines' shards.

Planned purely: `reshard/plan/layout.py` where everything lies on both sides, `reshard/plan/layout.py` on which ranks
of the job, `reshard/plan/flows.py` what has to move, `reshard/plan/assignment.py` who sends it,
`reshard/plan/assignment.py` how that is dealt out,
`reshard/plan/planner.py` in which rounds;
`reshard/plan/from_config.py` for a configuration, `reshard/plan/checks.py` what is refused before anything moves.
Then done: `reshard/run/executor.py`, with `reshard/run/copies.py` (on a GPU `reshard/run/copy_kernels.py`),
`reshard/run/scale_grids.py` and `reshard/run/checksum.py`. On paper: `reshard/plan/bound.py` what no plan can beat,
by other code; `reshard/plan/cost_report.py`,
`reshard/plan/from_config.py`, `reshard/plan/html_page.py` show a plan to people.

May import `models`, `parallel`, `config/`; workers import it, and the engine's processes its hash and copies.
"""
