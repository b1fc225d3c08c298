"""What operators see of running requests: metrics, one log line each, logging set-up."""
