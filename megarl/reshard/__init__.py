"""The reshard: the policy's weights from Megatron's shards straight into the engines' shards.

Planned purely: `layout.py` where everything lies on both sides, `sides.py` on which ranks of the job, `flows.py` what
has to move, `assignment.py` who sends it, `sharing.py` how that is dealt out, `planner.py` in which rounds;
`configured.py` for a configuration, `check.py` what is refused before anything moves.
Then done: `executor.py`, with `copies.py` (on a GPU `kernels.py`), `quantise.py` and `checksum.py`.
On paper: `bound.py` what no plan can beat, by other code; `paper.py`, `advice.py`, `picture.py` show a plan to people.

May import `models`, `parallel`, `config/`; workers import it, and the engine's processes its hash and copies.
"""
