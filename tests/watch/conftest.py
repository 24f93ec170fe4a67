"""What the tests of `watch` share: the stand-in for NVML, and one live run of two ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

from nvml_standin import NvmlStandin
from receiver import Receiver
from watched_run import WatchedRun, write_watched_job


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> NvmlStandin:
    """The stand-in for NVIDIA's management library."""
    return NvmlStandin.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    """A run of two ranks that goes on until a test, or the end of the module, stops it; its sampler has samples."""
    run = WatchedRun.start(write_watched_job(tmp_path_factory.mktemp("live")))
    try:
        run.wait_for(lambda: run.samples() and len(run.samples()[-1]["ranks"]) == 2, "a sample of two ranks")
        run.wait_for(lambda: len(run.steps()) >= 20, "twenty steps")
        yield run
    finally:
        run.stop()


@pytest.fixture
def hook() -> Iterator[Receiver]:
    """A webhook on this machine."""
    with Receiver.listening() as receiver:
        yield receiver
