"""The hardware room: what devices there are, what they can do, and which of them a job gets; knows nothing of torch."""
