"""The decision log and what lives beside it: keys, sessions, policy versions, in SQLite or PostgreSQL."""
