"""Drills: scripts that try a server for hours, and say what they found."""
