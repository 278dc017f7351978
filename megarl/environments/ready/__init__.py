"""Environments to begin with: an interpreter for mathematics and code, a search in documents, a game; `../README.md`."""
