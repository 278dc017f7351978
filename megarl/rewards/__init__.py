"""Reward functions, reward models, reward services, and the worker processes that call them; see `README.md`."""
