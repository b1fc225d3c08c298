"""Carries one admitted request to its row: route, call a tier, escalate, record."""
