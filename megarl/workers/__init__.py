"""Roles: what actor, reference, critic, reward and rollout can do, in terms of the packages below.

A worker is built on every rank by the flow, which hands it a `Context`. Its methods take and return whole global
values, the same on every rank; how the work is shared among the ranks is its own affair.
"""
