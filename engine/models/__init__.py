"""Whole models built from the layers."""
