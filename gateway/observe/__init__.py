"""Shows operators running requests: metrics, one log line each, logging set-up."""
