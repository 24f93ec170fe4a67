"""Layouts: the ways to run a Job on the devices there are, and the choice among them."""
