"""Plays, as a real HTTP server, an OpenAI-compatible provider, well or badly, for tests."""
