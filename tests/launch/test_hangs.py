"""When a run counts as hanging, and which rank is named: by heartbeats and evidence as data, the clock by hand."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainwright.launch.hangs.ending import Hangs
from trainwright.launch.hangs.evidence import ProcessState, RankEvidence
from trainwright.launch.hangs.fault import Hang, find_fault
from trainwright.launch.hangs.flight import Collective, FlightRecord
from trainwright.launch.hangs.rank_sections import RankSection, limit_s
from trainwright.launch.hangs.watching import Watching, stands_still
from trainwright.runs.folder import RunFolder

TIMEOUT_S = 600.0
ALL_REDUCE, BROADCAST, BARRIER = "gloo:all_reduce [[64]]", "gloo:broadcast [[64]]", "gloo:all_reduce [[1]]"


class Ranks:
    """Ranks whose heartbeats a watch sees once a second."""

    def __init__(self, count: int, timeout_s: float = TIMEOUT_S) -> None:
        self.now_s, self.hung_after_s = 1000.0, 0.0
        self.watching = Watching(count, timeout_s, self.now_s)
        self.beats: dict[int, dict[str, Any]] = {}
        self.frozen: set[int] = set()
        self.ended: set[int] = set()

    def enter(self, section: str, *ranks: int, step: int = 7, steps_total: int = 7, **p99_s: float) -> None:
        """Let ranks enter a section, having done `step`; what they entered long enough ago is their last word."""
        for rank in ranks:
            at = {"step": step, "steps_total": steps_total, "section": section, "section_since_s": self.now_s}
            self.beats[rank] = {"rank": rank, "time_s": 0.0, "pid": 100 + rank, **at, "sections_p99_s": p99_s}

    def let_pass(self, seconds: float, every_s: float = 1.0) -> list[RankSection] | None:
        """Look every so often; return where the ranks were when the run counted as hanging, None if it never did."""
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            self.now_s += every_s
            for rank, beat in self.beats.items():
                if rank not in self.frozen:
                    beat["time_s"] = self.now_s
            places = self.watching.see(self.beats, self.ended, self.now_s)
            if stands_still(places):
                self.hung_after_s = self.now_s - began_s
                return places
        return None


def test_a_rank_that_stays_in_a_step_hangs_the_run_after_the_time_out() -> None:
    """H01: rank 1 sleeps in its forward pass, rank 0 waits for it."""
    ranks = Ranks(2)
    ranks.enter("communication", 0)
    ranks.enter("forward", 1)
    assert ranks.let_pass(TIMEOUT_S - 5) is None
    places = ranks.let_pass(20)
    assert places is not None and [place.section for place in places] == ["communication", "forward"]
    assert not any(place.silent for place in places)


def test_a_section_that_usually_takes_long_may_take_three_times_that() -> None:
    ranks = Ranks(1)
    ranks.enter("data", 0, data=400.0)
    assert ranks.let_pass(1195) is None
    assert ranks.let_pass(20) is not None


@pytest.mark.parametrize(("section", "steps_total"), [("save", 7), ("eval", 7), ("other", 7), ("forward", 0)])
def test_a_save_an_evaluation_and_the_first_step_may_take_six_time_outs(section: str, steps_total: int) -> None:
    """H08: what compiles, evaluates or saves is slow, and does not hang."""
    ranks = Ranks(2)
    ranks.enter("communication", 0, steps_total=steps_total)
    ranks.enter(section, 1, steps_total=steps_total)
    assert ranks.let_pass(6 * TIMEOUT_S - 5) is None
    assert ranks.let_pass(20) is not None


def test_a_start_may_take_an_hour_whatever_the_time_out() -> None:
    ranks = Ranks(2, timeout_s=8)
    assert ranks.let_pass(1800) is None, "no rank has written anything yet: it imports, or loads the model"
    ranks.enter("start", 0, 1, step=0, steps_total=0)
    assert ranks.let_pass(3590) is None
    assert ranks.let_pass(30) is not None


def test_the_others_wait_as_long_as_the_one_that_may_still_be_busy() -> None:
    """Rank 0 waits for the checkpoint of rank 1 in a step section: no word of it before rank 1 is overdue too."""
    ranks = Ranks(4)
    ranks.enter("communication", 0, 2, 3)
    ranks.enter("save", 1)
    assert ranks.let_pass(3000) is None
    ranks.enter("data", 1, step=8)
    assert ranks.let_pass(590) is None
    assert ranks.let_pass(20) is not None


def test_twenty_healthy_runs_with_slow_parts_are_never_killed() -> None:
    """H08: five times a step for a save, an evaluation or the first step, at the edge of the time-out; 0 of 20."""
    for seed in range(20):
        draw, ranks = random.Random(seed), Ranks(2, timeout_s=10)
        usual_s: dict[str, float] = {}
        for step in range(60):
            for section in ("data", "forward", "backward", "communication", "optimizer", "other", "save", "eval"):
                if section in ("save", "eval") and step % 20:
                    continue
                stay_s = draw.uniform(1, 9) * (5 if section in ("save", "eval") or not step else 1)
                ranks.enter(section, 0, 1, step=step, steps_total=step, **usual_s)
                assert ranks.let_pass(stay_s) is None, (seed, step, section)
                usual_s[section] = max(usual_s.get(section, 0), stay_s)


def test_a_machine_that_was_suspended_proves_nothing() -> None:
    """`docker pause`, a closed lid, Ctrl+Z on the launcher: the clock went on, and nobody looked."""
    ranks = Ranks(2)
    ranks.enter("forward", 0, 1)
    assert ranks.let_pass(100_000, every_s=100_000) is None


def test_a_clock_that_is_set_does_not_matter() -> None:
    """C14: what ranks say of the time is compared with itself alone."""
    ranks = Ranks(1)
    ranks.enter("forward", 0)
    ranks.beats[0]["section_since_s"] = -1e9
    assert ranks.let_pass(500) is None


def test_ranks_that_have_all_ended_do_not_hang_and_one_that_has_not_does() -> None:
    ranks = Ranks(2)
    ranks.enter("end", 0, 1)
    ranks.ended = {0, 1}
    assert ranks.let_pass(10_000) is None
    ranks.ended = {1}
    assert ranks.let_pass(10_000) is not None


def test_a_heartbeat_of_an_older_version_is_read_too() -> None:
    assert limit_s({"section": "forward", "steps_total": 3}, 600) == 600


def place(rank: int, section: str, *, step: int = 7, silent_s: float = 0.5, ended: bool = False) -> RankSection:
    """A rank that has been in a section for a while."""
    return RankSection(
        rank=rank, section=section, there_s=11, limit_s=8, silent_s=silent_s, done=step, pid=100 + rank, ended=ended
    )


def calls(*texts: str, group: str = "0") -> FlightRecord:
    """A flight record of these calls, numbered from 1."""
    parts = (text.split(" ", 1) for text in texts)
    return FlightRecord(None, tuple(Collective(group, n, kind, sizes) for n, (kind, sizes) in enumerate(parts, 1)))


def process(rank: int, state: str = "S", at: str | None = None) -> ProcessState:
    return ProcessState(pid=100 + rank, name="python", state=state, stands_at=at)


ASLEEP = RankEvidence(process=process(1, at="task.py:30 in loss_sum"), flight=calls(ALL_REDUCE))
WAITING = RankEvidence(process=process(0, at="graph.py:9 in backward"), flight=calls(ALL_REDUCE, ALL_REDUCE))
LOOP = (ALL_REDUCE, ALL_REDUCE, BARRIER)


def fault(others: int, at_fault: RankEvidence, section: str, waiting: RankEvidence = WAITING, **more: Any) -> Hang:
    """Judge one rank that is somewhere while others wait, whatever its number; it has to be the same each time."""
    found = set()
    for number in range(others + 1):
        places = [place(rank, "communication") for rank in range(others + 1) if rank != number]
        places.append(place(number, section, **more))
        evidence = dict.fromkeys(range(others + 1), waiting) | {number: at_fault}
        hang = find_fault(places, evidence)
        assert hang.ranks == (number,) and hang.rank == number, hang
        found.add(hang.kind)
    assert len(found) == 1, found
    return hang


@pytest.mark.parametrize("others", [1, 3, 7])
class TestWhoIsNamed:
    """G5: the rank at fault and the kind of hang, never one that only waits for it."""

    def test_one_that_sleeps(self, others: int) -> None:
        hang = fault(others, ASLEEP, "forward")
        assert hang.kind == "hang" and "task.py:30 in loss_sum" in hang.why, hang
        assert "`forward` of step 8" in hang.why

    def test_one_that_sleeps_where_there_is_no_flight_recorder(self, others: int) -> None:
        hang = fault(others, RankEvidence(process=process(1, at="task.py:30 in f")), "forward", RankEvidence())
        assert hang.kind == "hang" and "task.py:30" in hang.why

    def test_one_that_is_stopped(self, others: int) -> None:
        hang = fault(others, RankEvidence(process=process(1, "T")), "backward", silent_s=11)
        assert hang.kind == "hang/stopped" and "stopped (state T)" in hang.why
        assert any("was heard of last 11 s ago, in `backward` of step 8" in line for line in hang.shown)

    def test_one_that_holds_the_interpreters_lock(self, others: int) -> None:
        hang = fault(others, RankEvidence(process=process(1, at="task.py:9 in hold")), "forward", silent_s=11)
        assert hang.kind == "hang/silent" and "GIL" in hang.why and "task.py:9 in hold" in hang.why

    def test_one_in_the_kernel(self, others: int) -> None:
        stuck = ProcessState(pid=101, name="python", state="D", waits_in="nfs_wait_bit")
        hang = fault(others, RankEvidence(process=stuck), "save", silent_s=11)
        assert hang.kind == "hang/silent" and "nfs_wait_bit" in hang.why and "GIL" not in hang.why

    def test_one_whose_heartbeat_is_slow_but_answers_is_not_silent(self, others: int) -> None:
        assert fault(others, ASLEEP, "forward", silent_s=11).kind == "hang"

    def test_one_that_waits_for_data_with_its_worker(self, others: int) -> None:
        """H06: the class is data starvation, and not the network."""
        worker = ProcessState(pid=999, name="pt_data_worker", state="S", stands_at="rows.py:5 in __getitem__")
        helper = ProcessState(pid=998, name="python", state="S")
        found = RankEvidence(process=process(1), children=(helper, worker), flight=calls(ALL_REDUCE))
        hang = fault(others, found, "data")
        assert hang.kind == "data-starvation/stuck"
        assert "pid 999" in hang.why and "rows.py:5 in __getitem__" in hang.why

    def test_one_that_waits_for_data_made_on_its_thread(self, others: int) -> None:
        found = RankEvidence(process=process(1), feeds_at="task.py:12 in collate", flight=calls(ALL_REDUCE))
        assert "task.py:12 in collate" in fault(others, found, "data").why

    def test_one_that_left_a_loop_early(self, others: int) -> None:
        """H05: it is at what comes after the loop, as it was in the step before; the others call once more."""
        waiting = RankEvidence(process=process(0, at="task.py:40 in f"), flight=calls(*LOOP, *LOOP[:2]))
        early = RankEvidence(process=process(1, at="task.py:41 in f"), flight=calls(*LOOP, ALL_REDUCE, BARRIER))
        hang = fault(others, early, "forward", waiting)
        assert hang.kind == "uneven-data" and "number 5" in hang.why, hang

    def test_one_that_is_further_with_fewer_collectives(self, others: int) -> None:
        early = RankEvidence(process=process(1), flight=calls(ALL_REDUCE))
        hang = fault(others, early, "data", step=8)
        assert hang.kind == "uneven-data" and "number 1" in hang.why and "number 2" in hang.why

    def test_one_that_has_ended(self, others: int) -> None:
        assert fault(others, RankEvidence(), "end", ended=True).kind == "uneven-data"


def test_ranks_that_call_different_collectives_are_shown_with_both_places() -> None:
    """H04: of two nobody can say which is wrong; of three, the odd one out is named."""
    reduces = RankEvidence(process=process(0, at="task.py:30 in f"), flight=calls(*LOOP, ALL_REDUCE))
    broadcasts = RankEvidence(process=process(1, at="task.py:33 in f"), flight=calls(*LOOP, BROADCAST))
    hang = find_fault([place(0, "forward"), place(1, "forward")], {0: reduces, 1: broadcasts})
    assert (hang.kind, hang.rank) == ("collective-mismatch", None)
    for said in ("number 4", "rank 0 gloo:all_reduce", "task.py:30", "rank 1 gloo:broadcast", "task.py:33"):
        assert said in hang.why, hang
    three = find_fault([place(rank, "forward") for rank in range(3)], {0: reduces, 1: broadcasts, 2: reduces})
    assert three.rank == 1


def test_ranks_that_reduce_other_sizes_are_a_mismatch_and_an_all_to_all_of_other_sizes_is_none() -> None:
    def of(call: str) -> RankEvidence:
        return RankEvidence(process=process(0), flight=calls(ALL_REDUCE, call))

    places = [place(0, "forward"), place(1, "communication")]
    unlike = find_fault(places, {0: of("nccl:all_reduce [[3]]"), 1: of("nccl:all_reduce [[4]]")})
    assert unlike.kind == "collective-mismatch"
    exchange = find_fault(places, {0: of("nccl:all_to_all [[3]]"), 1: of("nccl:all_to_all [[4]]")})
    assert (exchange.kind, exchange.rank) == ("hang", 0)


def test_what_differed_long_ago_and_was_passed_is_no_mismatch() -> None:
    first = calls("gloo:all_reduce [[1]]", *[ALL_REDUCE] * 9)
    second = calls("gloo:all_reduce [[2]]", *[ALL_REDUCE] * 8)
    hang = find_fault(
        [place(0, "communication"), place(1, "forward")],
        {0: RankEvidence(flight=first), 1: RankEvidence(flight=second)},
    )
    assert (hang.kind, hang.rank) == ("hang", 1)


def test_where_all_wait_in_the_same_collective_no_rank_is_named() -> None:
    """A wrong confident answer is worse than none (facts_reliability 4)."""
    hang = find_fault([place(0, "communication"), place(1, "communication")], {0: WAITING, 1: WAITING})
    assert (hang.kind, hang.ranks, hang.rank) == ("hang", (), None) and "network" in hang.why


def test_a_rank_alone_waits_for_nobody() -> None:
    hang = find_fault([place(0, "optimizer")], {0: RankEvidence(process=process(0, at="task.py:3 in f"))})
    assert (hang.kind, hang.rank) == ("hang", 0) and "wait" not in hang.why


def test_a_finding_is_the_same_after_it_was_stored() -> None:
    hang = fault(1, ASLEEP, "forward")
    assert Hang.from_json(json.loads(json.dumps(hang.to_json()))) == hang


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with an attempt begun."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.start_attempt()
    folder.ranks_dir.mkdir()
    return folder


def beat(folder: RunFolder, rank: psutil.Process, node: str, section: str = "data") -> Mapping[str, Any]:
    """Write the heartbeat of rank 0, as its process would."""
    record = {
        "attempt": 1,
        "rank": 0,
        "node": node,
        "pid": rank.pid,
        "time_s": 1.0,
        "step": 4,
        "steps_total": 4,
        "section": section,
        "section_since_s": 1.0,
    }
    folder.rank_json(0).write_text(json.dumps(record))
    return record


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between any two readings of the clock."""
    seconds = itertools.count(1000.0, 1.0)
    monkeypatch.setattr("trainwright.launch.hangs.ending.time.monotonic", lambda: next(seconds))
    monkeypatch.setattr("trainwright.launch.hangs.evidence.ANSWER_S", 0.0)


def looks(hangs: Hangs, times: int, codes: Collection[int | None] = (None,)) -> Hang | None:
    return next((hang for _ in range(times) if (hang := hangs.found(list(codes))) is not None), None)


@pytest.mark.usefixtures("quick_clock")
class TestLooking:
    """The supervisor's look at the heartbeats of an attempt."""

    def test_what_was_found_is_written_down(self, folder: RunFolder) -> None:
        beat(folder, psutil.Process(), "elsewhere", "forward")
        hang = looks(Hangs(folder, 1, 1, timeout_s=8), 40)
        assert hang is not None and hang.rank == 0
        assert Hang.from_json(json.loads(folder.hang_json(1).read_text())) == hang

    def test_a_time_out_of_0_waits_for_ever(self, folder: RunFolder) -> None:
        beat(folder, psutil.Process(), "elsewhere", "forward")
        assert looks(Hangs(folder, 1, 1, timeout_s=0), 100_000) is None

    def test_heartbeats_of_an_earlier_attempt_say_nothing(self, folder: RunFolder) -> None:
        beat(folder, psutil.Process(), "elsewhere", "forward")
        folder.start_attempt()
        assert looks(Hangs(folder, 2, 1, timeout_s=8), 1000) is None

    def test_a_disk_that_takes_no_files_ends_no_run(self, folder: RunFolder) -> None:
        """The ranks cannot write their signs of life then, and what is old proves nothing."""
        beat(folder, psutil.Process(), "elsewhere", "forward")
        shutil.rmtree(folder.attempt_dir(1))
        assert looks(Hangs(folder, 1, 1, timeout_s=8), 1000) is None

    def test_a_rank_that_gets_on_while_it_is_asked_is_no_hang(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def get_on(*arguments: object) -> dict[int, RankEvidence]:
            asked.append(arguments)
            folder.rank_json(0).write_text(json.dumps({**record, "step": len(asked), "section_since_s": len(asked)}))
            return {}

        record = beat(folder, psutil.Process(), "elsewhere", "forward")
        monkeypatch.setattr("trainwright.launch.hangs.ending.look", get_on)
        assert looks(Hangs(folder, 1, 1, timeout_s=8), 200) is None
        assert len(asked) > 3
