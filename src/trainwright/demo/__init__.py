"""The first ten minutes of a newcomer, as a command."""
