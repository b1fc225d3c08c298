"""Benches of the gateway: what it costs and what it keeps."""
