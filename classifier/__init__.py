"""Turns a request's text into calibrated sufficiency per tier."""
