"""Turns facts into decisions; no I/O, clock and randomness are arguments."""
