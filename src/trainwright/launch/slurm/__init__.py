"""A run on a Slurm cluster: what to ask for, the script, its submission, and what becomes of it."""
