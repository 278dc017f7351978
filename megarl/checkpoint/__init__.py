"""Weights and run state on disk: `models/hf_folder.py` reads and writes HF folders; the rest commits and resumes runs.

May import `models`, `parallel` and what is below them; workers and controllers import it.
"""
