"""Trackers of others that a run may tell its figures: an adapter for each, and the thread that feeds it.

An adapter imports its package when it is opened, in that thread. Imports `config/` and `types/` only; `tracker.py` of
`observe/` makes them.
"""
