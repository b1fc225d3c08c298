"""Holds the decoder's parts: linear, norm, rotary embedding, attention; each one a function or a small object."""
