"""The shipped combination of the graders' scores: combination.json, with its card inside."""
