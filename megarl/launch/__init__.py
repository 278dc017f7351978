"""Start, watch, end and restart the processes of a run, on one machine and by torchrun on several."""
