"""Months of operation in minutes: traffic with known truth through the real components, the clock compressed."""
