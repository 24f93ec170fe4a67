"""A Slurm cluster: the GPUs of its nodes, what its partitions allow, who waits; read from its programs' text."""
