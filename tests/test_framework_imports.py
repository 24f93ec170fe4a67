"""The two ways of making imports cheaper: what is seen meanwhile, and that all is as before afterwards."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from trainwright.framework_imports import collector_at_rest, left_out


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that is installed and that nothing has imported."""
    (tmp_path / "some_library.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_library", raising=False)
    return "some_library"


def test_a_package_that_is_left_out_seems_not_to_be_installed(library: str) -> None:
    """Both to who looks for it and to who tries to import it; afterwards it is there."""
    with left_out(library):
        assert find_spec(library) is None
        with pytest.raises(ModuleNotFoundError):
            import_module(library)
    assert import_module(library).VALUE == 7


def test_a_package_that_is_imported_already_stays_seen(library: str) -> None:
    """Something may be made of it."""
    module = import_module(library)
    with left_out(library):
        assert find_spec(library) is not None
        assert import_module(library) is module
    assert sys.modules[library] is module


def test_a_package_is_there_again_after_an_error(library: str) -> None:
    with pytest.raises(RuntimeError), left_out(library):
        raise RuntimeError
    assert find_spec(library) is not None


def test_the_collector_rests_while_frameworks_are_imported_and_then_goes_on(library: str) -> None:
    """What was imported is never looked through again; what comes later is."""
    with pytest.raises(RuntimeError), collector_at_rest():
        assert not gc.isenabled()
        raise RuntimeError
    try:
        assert gc.isenabled()
        with collector_at_rest():
            module = import_module(library)
            module.large = [[] for _ in range(10_000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() > 10_000
        assert not any(found is module.large for found in gc.get_objects())
    finally:
        gc.unfreeze()
