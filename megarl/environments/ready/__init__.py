"""Environments to begin with: an interpreter for mathematics and code, a search, a game; see `../README.md`."""
