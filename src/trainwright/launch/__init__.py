"""Starting a run on this machine, watching its ranks, and bringing it to its end."""
