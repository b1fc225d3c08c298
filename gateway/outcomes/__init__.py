"""Collects every tier's answers to the same prompts, and grades them."""
