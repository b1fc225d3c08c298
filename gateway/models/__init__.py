"""The served models and the router, loaded and named."""
