"""Environments to start with: a calculator, a Python session, a search, a game. See `../README.md`."""
