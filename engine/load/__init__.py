"""Loads a model from a folder or a hub id: files, names, quantised layouts."""
