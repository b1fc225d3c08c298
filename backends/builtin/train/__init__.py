"""Trains the built-in ladder: ``python -m backends.builtin.train``."""
