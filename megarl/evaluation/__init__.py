"""How good a policy is: what of is evaluated (`targets.py`), figures with intervals (`pass_at_k.py`, `bootstrap.py`,
`figures.py`), and talking to it (`talking.py`).

`megarl.eval` and `megarl.chat` are the programs. The three modules of figures know neither models nor engines. This
package may import all others; of the others only these two programs import it.
"""
