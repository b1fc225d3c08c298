"""What makes one probability of the graders' scores, as data: combination.json, with its card inside."""
