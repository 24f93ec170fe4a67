"""Results on disk: a line for each question as it ends, and from the lines the file that the guide names.

    <folder>/<stem>.lines/  settings.json  what was asked; lines of other settings are never mixed in
                            <writer>.jsonl  one writer each, append-only
    <folder>/<stem>.json    all of it, written whole or not at all

A killed run goes on from its lines, with any number of writers. Where two of them answered a question all the same,
the earlier answer counts, once, and the other is reported.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import UserError
from trainwright.evaluate.metrics import Record
from trainwright.evaluate.policies import PolicyEntry
from trainwright.runs import records
from trainwright.runs.writing import plain, read_json, write_json_atomic, write_json_once

RUN_FOLDER = Path("results/multi_gpu")
COMPARISON_FOLDER = Path("results/multi_gpu_comparison")
_FINISHED = "finished_at"

Key = tuple[str, str]
"""Name of the strategy, id of the question."""


def results_path(model: str, difficulty: str, questions: int, strategies: Sequence[PolicyEntry]) -> Path:
    """Return where the guide puts the results of one strategy, or of a comparison of several."""
    name = f"{model.rstrip('/').rpartition('/')[2]}_{difficulty}_{questions}q"
    if len(strategies) == 1:
        return RUN_FOLDER / f"{name}.json"
    return COMPARISON_FOLDER / f"{name}_{'_vs_'.join(strategy.slug for strategy in strategies)}.json"


@dataclass(frozen=True)
class Collected:
    """All whole lines of a run, each question of each strategy once."""

    records: dict[Key, Record]
    doubles: tuple[Key, ...]
    """Answered by more than one writer."""

    def of(self, strategy: str, questions: Iterable[str]) -> list[Record]:
        """Return the lines of one strategy in the order of `questions`, which must all be answered."""
        return [self.records[strategy, question] for question in questions]


class Lines:
    """The lines of one run, the only place that knows where they lie."""

    def __init__(self, results: Path) -> None:
        self.folder = results.with_suffix(".lines")

    def begin(self, settings: dict[str, Any]) -> None:
        """Make ready for writers; call it again to go on with a run.

        Raises:
            UserError: the folder holds lines of other settings, which are named.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "settings.json"
        write_json_once(path, settings)
        before, now = read_json(path), plain(settings)
        if before != now:
            differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            raise UserError(
                f"{self.folder} holds the lines of another evaluation",
                problems=[f"{key} was {before.get(key)!r}, and is {now.get(key)!r}" for key in differ],
                hints=["--fresh keeps them aside and starts anew", "or write to another folder: output_dir=FOLDER"],
            )

    def forget(self) -> None:
        """Set what was answered aside, under `<stem>.lines/old-N`, so that everything is asked again."""
        number = 1
        while (aside := self.folder / f"old-{number}").exists():
            number += 1
        former = [self.folder / "settings.json", *self.folder.glob("*.jsonl")]
        if any(path.exists() for path in former):
            aside.mkdir()
            for path in former:
                if path.exists():
                    path.rename(aside / path.name)

    def append(self, writer: str, record: Record) -> None:
        """Add the line of a question that has ended; it survives the process when this returns."""
        assert writer.replace("-", "").replace("_", "").isalnum(), writer
        now = datetime.datetime.now(datetime.UTC).isoformat()
        records.append(self.folder / f"{writer}.jsonl", {**record, _FINISHED: now})

    def collect(self) -> Collected:
        """Return what all writers wrote; half a line of a killed one is passed over."""
        lines = [
            (line.get(_FINISHED, ""), path.name, line)
            for path in sorted(self.folder.glob("*.jsonl"))
            for line in records.read(path)
        ]
        by_key: dict[Key, Record] = {}
        doubles = []
        for _, _, line in sorted(lines, key=lambda item: item[:2]):
            key = (line["strategy"], line["question_id"])
            if key in by_key:
                doubles.append(key)
            else:
                by_key[key] = {name: value for name, value in line.items() if name != _FINISHED}
        return Collected(by_key, tuple(doubles))

    def open_keys(self, strategies: Iterable[str], questions: Sequence[str]) -> list[Key]:
        """Return which questions are still to be answered by which strategy, in order."""
        done = self.collect().records
        return [(name, question) for name in strategies for question in questions if (name, question) not in done]


def write_results(path: Path, document: object) -> None:
    """Write a results file, whole or not at all; numbers of other libraries become plain ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, document)
