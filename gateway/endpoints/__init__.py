"""The HTTP endpoints that applications call."""
