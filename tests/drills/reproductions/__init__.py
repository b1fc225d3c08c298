"""Performs the reproductions of two reviews against the server of any checkout."""
