"""What a layout will cost: memory of each rank by part, and time."""
