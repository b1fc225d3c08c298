"""Where everything meets: HTTP, settings, stores, telemetry and the command line."""
