from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

from nvml_standin import NvmlStandin


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> NvmlStandin:
    """The stand-in for NVIDIA's management library."""
    return NvmlStandin.build(tmp_path_factory.mktemp("nvml"))
