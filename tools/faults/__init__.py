"""Faults injected into real runs, for `fault_matrix.py`; `README.md` explains how to add a row."""
