"""How a run is: what its events say last, unless a later attempt began since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from trainwright.launch.failures import telling_line
from trainwright.runs.folder import RunFolder
from trainwright.runs.values import text, whole
from trainwright.watch import formatting
from trainwright.watch.view import RunState

SILENT_S: Final = 30.0
ENDS: Final[dict[str, RunState]] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


def state_of(
    folder: RunFolder,
    events: Iterable[Mapping[str, Any]],
    *,
    heard_s: float | None,
    newest_attempt: int,
    now_s: float,
) -> tuple[RunState, str | None]:
    """Return the state of a run and, where it failed or is silent, why or for how long.

    `heard_s` is its last sign of life in seconds since the epoch, None without any; `newest_attempt` is the latest of
    which there is a sign, 0 without any.
    """
    if folder.finished_json.is_file():
        return "finished", None
    turns = [event for event in events if event.get("event") in ("started", *ENDS)]
    if turns and turns[-1]["event"] in ENDS:
        end = turns[-1]
        if newest_attempt <= (whole(end, "attempt") or 0):
            return ENDS[end["event"]], telling_line(text(end, "text") or "")
    if heard_s is None:
        return "preparing", None
    if now_s - heard_s > SILENT_S:
        return "silent", f"no sign of life for {formatting.duration(now_s - heard_s)}, and no word of its end"
    return ("running" if turns else "preparing"), None
