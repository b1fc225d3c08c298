"""Translates between a tier's text and the engine's token ids."""
