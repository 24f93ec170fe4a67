"""How a job's throughput grows with the GPUs, measured in short runs of it."""
