"""Where what earlier runs measured is kept, on the user's machine."""

from __future__ import annotations

import os
from pathlib import Path


def user_data_dir() -> Path:
    """Return `$XDG_DATA_HOME/trainwright`; a relative path there is to be ignored (XDG Base Directory Specification).

    Raises:
        RuntimeError: the user has no home.
    """
    given = os.environ.get("XDG_DATA_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".local/share"
    return base / "trainwright"
