"""Carries out each command; :mod:`gateway.cli` declares the commands and imports a module when its command runs."""
