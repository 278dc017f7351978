"""Reward functions, reward models, reward services, and the worker processes that call them. `README.md` lists them.

A custom reward function may live in any module: name it as `module:name` in `reward.functions`.
"""
