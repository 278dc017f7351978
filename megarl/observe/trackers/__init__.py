"""Third-party trackers: one adapter each, and the thread that feeds it.

An adapter imports its package when it is opened, in that thread.
"""
