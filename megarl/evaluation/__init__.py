"""How good answers are, and how sure that is: pass@k (`pass_at_k.py`), intervals (`bootstrap.py`), and the figures of
an evaluation by data source with their table (`figures.py`); answers as lines of JSON (`lines.py`).

Pure: it knows `megarl.types` and nothing else. The program is `.venv/bin/python -m megarl.eval`;
controllers have pass@k from here.
"""
