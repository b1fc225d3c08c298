"""Declares the settings, reads them from files and environment, and ships the built-in ladder."""
