"""Draws natural-language tasks with checkable answers, in five grades of difficulty; pure Python, no torch."""
