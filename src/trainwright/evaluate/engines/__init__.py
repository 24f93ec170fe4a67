"""Engines: a language model behind one protocol, which answers any number of prompts, batched inside."""
