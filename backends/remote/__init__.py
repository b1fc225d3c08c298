"""Serves models of OpenAI-compatible servers over HTTP: replicas, retries, breakers, streams."""
