"""Checks before a run: the machine, the environment, and the job on them."""
