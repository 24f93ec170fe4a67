"""Trainwright plans, launches, keeps running and explains the fine-tuning of language models."""

__version__ = "0.1.0"
