"""Workers of the roles actor, critic, reference, reward and rollout, built from the packages below.

The flow builds a worker on every rank and passes it a `Context`. Methods take and return global values, the same on
every rank; each worker decides how ranks share the work.
"""
