"""Codecs between outside protocols and one internal form of requests and answers."""
