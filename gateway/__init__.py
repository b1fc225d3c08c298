"""Joins everything: HTTP, settings, stores, telemetry and the command line."""
