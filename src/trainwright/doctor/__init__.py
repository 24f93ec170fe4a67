"""The doctor: checks of machine and job before a run, and the one cause of what went wrong after it."""
