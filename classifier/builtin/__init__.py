"""Holds the router of the built-in ladder, as data: router.npz and its card router.md."""
