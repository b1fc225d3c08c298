"""What the gateway costs and what it keeps: measured, not claimed."""
