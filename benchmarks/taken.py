"""When, by which command and with which versions the figures of a result were taken."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

LIBRARIES = ("trainwright", "torch", "transformers")


def taken(command: str, libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    """Return the head of a result: schema version, date, command, versions of Python and the libraries, cores."""
    return {
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
        "cores": os.cpu_count(),
    }
