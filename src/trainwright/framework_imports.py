"""Importing torch and what stands on it: thousands of modules, and the larger part of a short process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Import without looking for garbage; what is there at the end is never looked through again.

    What is imported stays: to look through it again and again is a fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def left_out(package: str) -> Iterator[None]:
    """Play that a package is not installed, unless something has imported it before.

    Libraries import what they find installed; what nobody here has imported, nothing here is made of.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
