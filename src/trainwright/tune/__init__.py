"""The largest and the fastest micro-batch of a job on the devices there are, measured in a few short probes."""
