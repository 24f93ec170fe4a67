"""Figures as people read them; None is `n/a`, not available."""

from __future__ import annotations

import datetime
from typing import Final

from trainwright.hardware.reading import GIB, MIB

NOT_AVAILABLE = "n/a"
LONGEST_S: Final = 253_000_000_000.0
"""From 1970 to near the end of the year 9999, beyond which there is no date."""


def number(value: float | None, spec: str = ",.4g", unit: str = "") -> str:
    """Return a figure with its unit."""
    return NOT_AVAILABLE if value is None else f"{value:{spec}}{unit and ' ' + unit}"


def gib(value_bytes: float | None) -> str:
    """Return bytes in GiB."""
    return NOT_AVAILABLE if value_bytes is None else f"{value_bytes / GIB:.1f} GiB"


def used_of(used_bytes: float | None, total_bytes: float | None) -> str:
    """Return how much of something is used, in GiB and per cent."""
    if used_bytes is None or not total_bytes:
        return NOT_AVAILABLE
    return f"{used_bytes / GIB:.1f}/{total_bytes / GIB:.1f} GiB {100 * used_bytes / total_bytes:3.0f} %"


def of_limit(value: float | None, limit: float | None, unit: str) -> str:
    """Return a reading, beside its limit where that is known."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.0f} {unit}" if limit is None else f"{value:.0f}/{limit:.0f} {unit}"


def rate(bytes_s: float | None) -> str:
    """Return a rate in MiB/s."""
    return NOT_AVAILABLE if bytes_s is None else f"{bytes_s / MIB:,.1f} MiB/s"


def duration(seconds: float | None) -> str:
    """Return a time span, as 0:12:10 from a minute on."""
    if seconds is None or abs(seconds) > LONGEST_S:
        return NOT_AVAILABLE
    return f"{seconds:.0f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def clock(time_s: float) -> str:
    """Return a moment as the time of the day here; one before 1970 or after the year 9999 is none."""
    return _moment(time_s, "%H:%M:%S")


def date_and_clock(time_s: float) -> str:
    """Return a moment with its date, in the same way."""
    return _moment(time_s, "%Y-%m-%d %H:%M:%S")


def _moment(time_s: float, form: str) -> str:
    if not 0 <= time_s < LONGEST_S:
        return NOT_AVAILABLE
    return datetime.datetime.fromtimestamp(time_s).strftime(form)
