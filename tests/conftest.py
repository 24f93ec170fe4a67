"""What every test starts from: no measurements of earlier runs on this machine, and none of its settings."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.hardware.threads import waiting_policy
from trainwright.out_of_memory import ALLOCATOR_VARIABLES

# Several files are tested at once, each with processes of its own. OpenMP reads this when torch is first imported.
os.environ.update(waiting_policy())
# Under nohup the one is ignored, in a background job of a script the other. Children would inherit that, and neither
# would stop them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the files that took longest when `make durations` was last called start first, new ones before them.

    A worker takes the next file when it is free: what is long must not be what is left.
    """
    if hasattr(config, "workerinput"):
        took_s = json.loads(Path(__file__).with_name("durations.json").read_text())
        items.sort(key=lambda item: -took_s.get(item.nodeid.split("::")[0], math.inf))


@pytest.fixture(scope="session", autouse=True)
def _no_earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Plans are corrected by what runs measured, which is kept under XDG_DATA_HOME, and go by the allocator's settings.

    Here there are neither.
    """
    place = tmp_path_factory.mktemp("data-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(place))
        for name in ALLOCATOR_VARIABLES:
            patch.delenv(name, raising=False)
        yield place
