"""Reward functions, reward models and services, and the processes that call them. `README.md` lists them.

A reward function of your own may live in any module: name it `module:name` in `reward.functions`.
"""
