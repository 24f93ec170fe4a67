"""What is worth telling of a run: conditions with the guides' thresholds, each told once until it is over."""
