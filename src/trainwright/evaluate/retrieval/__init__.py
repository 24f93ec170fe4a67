"""Retrieval: passages of a corpus, and an index that finds them by their words."""
