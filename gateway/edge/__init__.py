"""HTTP itself: server, heads, bodies, watchdog, responses, the table of errors."""
