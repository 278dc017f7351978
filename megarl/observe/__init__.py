"""What a run shows and records: metrics, trackers, the progress display, recorded rollouts, the run folder, watchdogs.

Controllers and workers import it. Nothing here may stop training, except the guards that the user sets.
"""
