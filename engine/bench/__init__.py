"""Measures the engine beside its peers: ``python -m engine.bench``."""
