"""Learns from the log: a training table, new routers, and whether they are better."""
