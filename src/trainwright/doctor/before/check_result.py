"""The outcome of one check, and all of them as text and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainwright.doctor.lines import shown

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Checked:
    """What one check found; `fixes` are commands or changes, in the order to try."""

    check: str
    status: Status
    text: str
    fixes: tuple[str, ...] = ()


def ok(check: str, text: str) -> Checked:
    """Return that something is as it should be."""
    return Checked(check, "ok", text)


def warning(check: str, text: str, *fixes: str) -> Checked:
    """Return something that a run may suffer from."""
    return Checked(check, "warning", text, fixes)


def problem(check: str, text: str, *fixes: str) -> Checked:
    """Return something that a run would fail of."""
    return Checked(check, "problem", text, fixes)


def lines_of(checks: Iterable[Checked]) -> Iterator[str]:
    """Yield each check on a line, with its fixes below."""
    for checked in checks:
        yield f"{checked.status:8} {checked.check:12} {shown(checked.text, 600)}"
        yield from (f"{'':8} {'':12} fix: {shown(fix, 600)}" for fix in checked.fixes)


def as_data(checks: Sequence[Checked]) -> dict[str, Any]:
    """Return plain data, with the version of its shape."""
    return {
        "schema_version": 1,
        "problems": sum(checked.status == "problem" for checked in checks),
        "warnings": sum(checked.status == "warning" for checked in checks),
        "checks": [dataclasses.asdict(checked) for checked in checks],
    }
