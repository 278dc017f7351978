"""Reward functions of a finished rollout, and what calls them.

May import `data/`, `types/` and `config.py`; imported by workers and controllers. A reward of yours may live in any
module: name it `module:name` in `reward.functions`.
"""
