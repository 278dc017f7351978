"""Roles: what actor, critic, reference, reward and rollout can do, in terms of the packages below.

The flow builds a worker on every rank and hands it a `Context`. Methods take and return global values, the same on
every rank; how ranks share the work is up to the worker.
"""
