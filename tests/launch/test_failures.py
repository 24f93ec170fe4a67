"""The cause of a failed attempt, told apart from what it did to the other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.launch.failures import cause_of, read_failures

GONE = (
    "torch.distributed.DistBackendError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:44817"
)
RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:4817: "
    "Connection reset by peer"
)
TIMED_OUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
    "Timed out waiting 8000ms for recv operation to complete"
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network "
    "error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error"
)
OWN = 'Traceback (most recent call last):\n  File "task.py", line 3, in loss_sum\nZeroDivisionError: division by zero'


def fail(folder: Path, rank: int, text: str, *, time_s: float) -> None:
    """Write what a rank leaves of its end."""
    (folder / f"rank_{rank}.error.json").write_text(json.dumps({"rank": rank, "time_s": time_s, "text": text}))


@pytest.mark.parametrize("collateral", [GONE, RESET, TIMED_OUT, NCCL])
@pytest.mark.parametrize("name, code", [("SIGKILL", -9), ("SIGSEGV", -11), ("SIGBUS", -7)])
def test_a_rank_that_a_signal_ended_is_the_cause_whatever_the_others_say(
    tmp_path: Path, collateral: str, name: str, code: int
) -> None:
    """S10, M08, G5: the texts are those recorded from gloo and NCCL; memory is not guessed at."""
    fail(tmp_path, 0, collateral, time_s=1.0)
    fail(tmp_path, 2, collateral, time_s=2.0)
    cause = cause_of(read_failures(tmp_path, [1, code, 1], killed=()))
    assert cause.rank == 1
    assert cause.killed
    assert cause.describe() == f"rank 1 was ended by {name}"


def test_a_survivor_that_aborts_is_not_the_cause(tmp_path: Path) -> None:
    """G5: torchrun named the survivor (SIGABRT) in one of seven runs."""
    for codes, cause in (([-6, -9], 1), ([-9, -6], 0)):
        assert cause_of(read_failures(tmp_path, codes, killed=())).rank == cause


def test_an_exception_comes_before_what_it_caused_even_if_it_was_written_later(tmp_path: Path) -> None:
    """G5: the rank that raised may take longer to write than the one that lost its connection."""
    fail(tmp_path, 0, f"Traceback ...\n{GONE}", time_s=10.0)
    fail(tmp_path, 1, OWN, time_s=10.2)
    cause = cause_of(read_failures(tmp_path, [1, 1], killed=()))
    assert (cause.rank, cause.killed) == (1, False)
    assert "rank 1" in cause.describe() and "ZeroDivisionError" in cause.describe()


def test_of_two_exceptions_the_first_is_the_cause(tmp_path: Path) -> None:
    """G5"""
    fail(tmp_path, 0, OWN, time_s=10.2)
    fail(tmp_path, 1, OWN, time_s=10.1)
    assert cause_of(read_failures(tmp_path, [1, 1], killed=())).rank == 1


def test_a_rank_that_left_without_a_word_is_named_with_its_status(tmp_path: Path) -> None:
    """G5: os._exit(3) in one rank; the other lost its connection."""
    fail(tmp_path, 0, GONE, time_s=1.0)
    cause = cause_of(read_failures(tmp_path, [1, 3], killed=()))
    assert cause.describe() == "rank 1 ended with exit status 3 and left no word"


def test_last_words_that_were_cut_short_count_as_none(tmp_path: Path) -> None:
    """G5: a rank was killed, or its disk was full, while it wrote."""
    (tmp_path / "rank_0.error.json").write_text('{"rank": 0, "text": "Trace')
    cause = cause_of(read_failures(tmp_path, [73], killed=()))
    assert cause.describe() == "rank 0 ended with exit status 73 and left no word"


def test_where_all_only_saw_the_others_go_no_rank_is_blamed(tmp_path: Path) -> None:
    """G5: a wrong confident answer is worse than none."""
    fail(tmp_path, 0, TIMED_OUT, time_s=1.0)
    fail(tmp_path, 1, GONE, time_s=2.0)
    told = cause_of(read_failures(tmp_path, [1, 1], killed=())).describe()
    assert told.startswith("no rank says why; rank 0 only saw")
    assert TIMED_OUT in told


def test_ranks_that_ended_well_or_by_the_launchers_hand_are_no_failures(tmp_path: Path) -> None:
    """G5: done, stopped, still running, and killed by the launcher after the first failure."""
    failures = read_failures(tmp_path, [0, 75, None, -9, 1], killed={3})
    assert [failure.rank for failure in failures] == [4]
