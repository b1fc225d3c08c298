"""One Backend protocol: the local engine, and OpenAI-compatible servers over httpx."""
