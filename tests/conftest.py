"""What every test starts from: no measurements of earlier runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Plans are corrected by what runs measured, which is kept under XDG_DATA_HOME; here none has."""
    before = os.environ.get("XDG_DATA_HOME")
    place = tmp_path_factory.mktemp("data-home")
    os.environ["XDG_DATA_HOME"] = str(place)
    yield place
    if before is None:
        del os.environ["XDG_DATA_HOME"]
    else:
        os.environ["XDG_DATA_HOME"] = before
