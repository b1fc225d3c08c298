"""Builds whole models from the layers."""
