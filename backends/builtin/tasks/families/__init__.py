"""Holds one module a family; each draws a problem of a given grade from a given random source."""
