"""The Job: its schema, the reading of job files, overrides and presets."""
