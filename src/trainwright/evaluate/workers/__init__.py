"""What runs inside the workers: `python -m trainwright.evaluate.workers FD`, FD a socket to the command. Nothing
imports it; it is started as a process."""
