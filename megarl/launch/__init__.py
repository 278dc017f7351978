"""How the processes of a run are started, watched, ended and started again, on one machine and by torchrun on many.

Nothing in megarl but the entry points and the flow imports it.
"""
