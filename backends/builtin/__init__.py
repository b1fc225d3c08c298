"""Holds the built-in ladder: small models of our own, their tasks, and the script that trained them."""
