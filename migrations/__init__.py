"""The database's history, one reversible step per file."""
