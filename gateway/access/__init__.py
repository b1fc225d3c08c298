"""Decides who may come in and how much: authentication, rate limits, budgets, admission control."""
