"""Holds one Backend protocol and its families: the local engine, and OpenAI-compatible servers over httpx."""
