"""A run that stands still: noticed by its ranks' heartbeats, looked into before it is ended, one rank named."""
