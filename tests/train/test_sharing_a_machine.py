"""How the threads of a rank wait for each other, as OpenMP itself reports it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_runs import CompletedRun, RunTrain, WriteJob


@pytest.mark.parametrize(
    ("by_user", "spins"),
    [({}, "0"), ({"GOMP_SPINCOUNT": "1234"}, "1234")],
    ids=["nothing set", "set by the user"],
)
def test_harm_09_threads_sleep_while_they_wait(
    by_user: dict[str, str],
    spins: str,
    write_job: WriteJob,
    run_train: RunTrain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside another busy process, threads that spin hold the core that the others need to go on."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in by_user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    job = write_job(tmp_path, train={"max_steps": 1}, data={"cache_dir": str(tmp_path / "cache")})
    done = run_train(job)
    assert done.exit_code == 0, done.stderr
    rank, preparing = _spin_counts(done, "rank_0.log"), _spin_counts(done, "prepare.log")
    assert rank == {spins}
    assert preparing <= {spins}


def _spin_counts(run: CompletedRun, log: str) -> set[str]:
    found = next(iter(sorted(run.folder.rglob(log))))
    return set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", found.read_text()))
