"""Benchmarks: reading questions, naming the bad ones, choosing which to ask."""
