"""What runs inside the workers: `python -m trainwright.evaluate.workers.serve FD`, FD a socket to the command. Nothing
imports it; it is started as a process."""
