"""Published measurements as requests: one module a source, what the rows share, memory and time."""
