"""Observability of a run: metrics, trackers, progress display, recorded rollouts, run folder, guards, hang watchdog.

Imported by controllers and workers. Nothing here may stop training except the guards that the user sets.
"""
