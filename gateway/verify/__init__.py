"""Checks a sample of the answers: who is drawn, who checks, how it is graded, what callers report."""
