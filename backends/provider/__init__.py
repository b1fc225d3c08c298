"""A real HTTP server that plays an OpenAI-compatible provider, well or badly, for tests."""
