"""Asking Slurm for GPUs: the requests that would run a job, and which of them has the model soonest."""
