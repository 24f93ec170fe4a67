"""Trainwright plans, launches, keeps running and explains the fine-tuning of language models."""

from trainwright.reporting import report

__all__ = ["report"]
__version__ = "0.1.0"
