"""What every tier answers to the same prompts, and what those answers are worth."""
