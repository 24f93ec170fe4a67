"""Question answering on many GPUs: questions, policies that decide when to retrieve, scoring and results."""
