"""How models write tool calls: one format a file, chosen by :mod:`.registry`."""
