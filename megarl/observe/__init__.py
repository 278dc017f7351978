"""What a run shows and leaves behind: metrics, trackers, the live display, recorded rollouts, the run folder.

Imports `parallel/`, `config/`, `types/` and `models/` only; controllers and workers import it. Nothing here may stop
training.
"""
