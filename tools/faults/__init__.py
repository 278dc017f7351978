"""Faults that are put into real runs, for `fault_matrix.py`; `README.md` says how a row is made."""
