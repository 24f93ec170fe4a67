"""One log read once: the signs of causes in it, exceptions with their places, losses, and how far it came."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainwright.doctor.causes import Cause, Sieve
from trainwright.doctor.finding import Evidence
from trainwright.doctor.lines import blocks_of, shown
from trainwright.doctor.literals import Sought
from trainwright.doctor.losses import COMPLETED, Losses, gradient_in, loss_in
from trainwright.doctor.progress_parser import Meters
from trainwright.launch.hangs.stacks import StackFrame

_DIGITS: Final = b"0123456789abcdefABCDEF"
_ALIKE: Final = 256
"""Of lines that differ in (hexadecimal) digits alone, so many are looked at: a log of a gigabyte has few kinds."""
_DULL: Final = 8
"""A line without a sign, and of no traceback, counts for so many."""
_DENSE: Final = 20_000
_SPARSE: Final = 16
"""After so many lines with a loss, one in so many is read: its course is known by then; a NaN is never passed over."""
_SILENT: Final = -1
"""A kind that was met often enough, of which no line can tell a loss or a NaN."""
_MOST_KINDS: Final = 200_000
_MOST_SIGHTINGS: Final = 4000
_LONGEST_MESSAGE: Final = 4000
_STAMP: Final = re.compile(
    r"^(?:\[[\w.-]+\] )?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?"
    r"(?: +(?:ERR|ERROR|WARN|INFO|(?:stderr|stdout) F)\b)?(?: +|$)"
)
"""What collectors of logs put before a line: the name of a pod, the time, the stream or level."""
_RANK: Final = re.compile(
    r"\s*(?:\[\d+\](?=\[default))?\[(?:rank ?|default|Rank )?(\d+)\](?:<std\w+>)?:? ?"
    r"|\s*\[\d+,(\d+)\]<std\w+>:? ?"
    r"|\s*(\d{1,4}): (?=\S|  )"
    r"|\(rank (\d+)/\d+\) "
)
"""As torchrun, mpirun, srun and fairseq write it before a line."""
_RANK_WORD: Final = re.compile(r"\b(?:local_)?[Rr]ank[:= ]? ?(\d{1,5})\b")
_RANK_OF_FILE: Final = re.compile(r"rank[_-]?(\d{1,5})\b|/(\d{1,4})/std(?:err|out)\.log$")
_FRAME: Final = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_EXCEPTION: Final = re.compile(
    r"^(?:E\s+)?(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|NotFound"
    r"|OutOfMemory|Iteration|Failure|Failed|Mismatch)|(?:[a-z_]\w*\.)+[A-Z]\w+)(?P<said>: .*)?$"
)
_STEP: Final = re.compile(r"(?:^|[\s|])(\d{1,9})/(\d{1,9})\s*\[|^step ([\d,]+)/([\d,]+)  ")
_BATCH_OF: Final = re.compile(r"\b(?:batch|step|iter(?:ation)?)\W{1,3}(\d{1,9})/(\d{1,9})\b", re.IGNORECASE)
_PREPARING: Final = re.compile(
    r"(?:Loading|Fetching|Downloading|Map|Filter|Tokeniz|Running tokenizer|Generating|Extracting)"
)
"""Bars of what comes before the first step."""
_BATCHES: Final = Sought.of(r"\b(\d{1,9}) batches\b")
_ROOT: Final = "Root Cause (first observed failure)"
_SPAWNED: Final = Sought.of(r"^-- Process (\d{1,5}) terminated with the following error")
_ROOT_RANK: Final = re.compile(r"^\s*rank\s+: (\d{1,5}) \(local_rank")
_EXITED: Final = re.compile(r"^\s*exitcode\s+: -?\d+ \(pid: (\d+)\)")
_ENDED_WELL: Final = Sought.of(r"Process \d+ exits successfully|^exit (?:status|code):? 0$")
"""Of one process, or of a shell: another rank may have failed."""
_NOT_A_NUMBER: Final = re.compile(rb"\b[A-Za-z][\w/.-]*['\"]?\s*[:= ]\s*['\"]?(?:nan|NaN|NAN)\b")
_GPU_PROCESS: Final = re.compile(r"^\s*(\d+), (\d+) MiB, \S+|^\|\s+\d+\s+\S+\s+\S+\s+(\d+)\s+C\S*\s.*?(\d+)MiB \|")


@dataclass(frozen=True)
class Sighting:
    """A sign of a cause, or an exception, at one place of one log."""

    cause: Cause
    place: str
    text: str
    order: int
    """Position in its log."""
    log: str
    rank: int | None
    fields: dict[str, str]
    frames: tuple[StackFrame, ...]
    losses_before: int

    @property
    def evidence(self) -> Evidence:
        """Return it as it is shown."""
        return Evidence(self.place, self.text)

    @property
    def told_rank(self) -> int | None:
        """The rank that it names, else the one whose line it is."""
        return int(self.fields["rank"]) if self.fields.get("rank", "").isdigit() else self.rank

    @property
    def where(self) -> StackFrame | None:
        """The deepest frame of the user's own code, else the deepest there is."""
        return next((frame for frame in reversed(self.frames) if frame.own), self.frames[-1] if self.frames else None)


@dataclass
class Scan:
    """What one log holds."""

    name: str
    rank: int | None = None
    sightings: list[Sighting] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    lines: int = 0
    step: int | None = None
    """The last step that a step line or a progress bar told."""
    batches: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: the batch it told last, and of how many."""
    completed_at: int | None = None
    left_at: int | None = None
    """Where a program was told to have left without destroying its process group."""
    ended_well_at: int | None = None
    """Where a process was told to have ended with exit status 0, which acquits no other."""
    root_rank: int | None = None
    """The rank that torchrun saw fail first."""
    ranks_by_pid: dict[str, int] = field(default_factory=dict)
    """As torchrun told them."""
    meters: Meters = field(default_factory=Meters)
    nan_lines: int = 0
    last_nan: int = 0
    gpu_processes: list[tuple[int, float]] = field(default_factory=list)
    """Processes and their GiB in a list of nvidia-smi's."""
    words: list[tuple[str, str]] = field(default_factory=list)
    """What NCCL's watchdog said, with its places."""
    facts: dict[str, str] = field(default_factory=dict)
    """Figures that the log tells of its run (FACTS)."""


FACTS: Final = {
    "micro_batch": Sought.of(r"Instantaneous batch size per device = ([\d,]+)|train_micro_batch_size_per_gpu\D+(\d+)"),
    "accumulation": Sought.of(r"Gradient Accumulation steps = ([\d,]+)|gradient_accumulation_steps\D+(\d+)"),
    "global_batch": Sought.of(r"Total train batch size \([^)]*\) = ([\d,]+)"),
    "expandable": Sought.of(r"(?<!try setting )PYTORCH_(?:CUDA_)?ALLOC_CONF\S*(expandable_segments:\s*True)"),
    "trainer": Sought.of(r"\*\*\*\*\* Running training \*\*\*\*\*|transformers/trainer\.py"),
    "lightning": Sought.of(r"lightning/pytorch|pytorch_lightning"),
    "gpu_world": Sought.of(r"CUDA_VISIBLE_DEVICES[=: ]+(\S+)"),
}


class _Reader:
    """The state that reading a log needs, beside what it finds."""

    def __init__(self, scan: Scan, every_exception: Cause) -> None:
        self.scan = scan
        self._exception = every_exception
        self._kinds: dict[int, int] = {}
        self._sieve = Sieve("")
        self._loss_lines = 0
        self._frames: dict[int | None, deque[StackFrame]] = {}
        self._in_traceback: set[int | None] = set()
        self._ignored: set[int | None] = set()
        """Whose next traceback is one that Python only mentions (`Exception ignored in`)."""
        self._in_summary = False
        self._summary_rank = 0
        """The rank whose failure torchrun's summary lists at the moment."""

    def read(self, numbers: Sequence[int], lines: list[bytes]) -> None:
        """Read a block of lines; those of a kind that was met often enough are passed over."""
        shapes = b"\n".join(lines).translate(None, _DIGITS).split(b"\n")
        kinds, met = list(map(hash, shapes)), self._kinds
        to_look_at = [0 <= met.get(kind, 0) < _ALIKE for kind in kinds]
        text = b"\n".join(itertools.compress(lines, to_look_at)).decode("utf-8", "replace")
        self._sieve, texts = Sieve(text), iter(text.split("\n"))
        for number, line, shape, kind, looked_at in zip(numbers, lines, shapes, kinds, to_look_at, strict=True):
            decoded = next(texts) if looked_at else ""
            seen = met.get(kind, 0)
            if seen == _SILENT:
                continue
            self._course(number, line)
            if seen >= _ALIKE:
                continue
            seen += 1 if self._look(number, decoded.rstrip()) else _DULL
            if kind in met or len(met) < _MOST_KINDS:
                met[kind] = _SILENT if seen >= _ALIKE and not _may_tell_a_loss(shape) else seen

    def _course(self, number: int, line: bytes) -> None:
        if b"oss" in line:
            self._loss_lines += 1
            if self._loss_lines < _DENSE or self._loss_lines % _SPARSE == 0 or b"nan" in line.lower() or b"inf" in line:
                self._loss(number, line)
            else:
                self.scan.losses.count += 1
        if (b"nan" in line or b"NaN" in line or b"NAN" in line) and _NOT_A_NUMBER.search(line):
            self.scan.nan_lines, self.scan.last_nan = self.scan.nan_lines + 1, number

    def _loss(self, number: int, line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        loss = loss_in(text)
        if loss is not None:
            self.scan.losses.add(loss, f"{self.scan.name}:{number}", gradient_in(text))

    def _look(self, number: int, line: str) -> bool:
        """Look for all there is to find; say whether there was a sign or a part of a traceback."""
        rank, body = _rank_and_body(line)
        in_stack = self._stack(body, rank)
        self._figures(number, line, self.scan.rank if rank is None else rank)
        if ("Watchdog caught" in line or "last completed" in line) and len(self.scan.words) < _MOST_SIGHTINGS:
            self.scan.words.append((f"{self.scan.name}:{number}", line))
        has_sign = self._signs(number, line, body, rank)
        if rank in self._in_traceback and (error := _EXCEPTION.match(body)):
            self._in_traceback.discard(rank)
            if not has_sign:
                self._note(self._exception, number, body, rank, {"error": _in_short(error["kind"], error["said"])})
        return has_sign or in_stack

    def _signs(self, number: int, line: str, body: str, rank: int | None) -> bool:
        """Note the signs of a line; say whether one of them may be a cause."""
        has_sign = False
        for sign in self._sieve.of(line, in_traceback=rank in self._in_traceback):
            match = sign.pattern.search(body) or (sign.pattern.search(line) if body != line else None)
            if match is not None and len(self.scan.sightings) < _MOST_SIGHTINGS:
                self._note(sign.cause, number, body, rank, {k: v for k, v in match.groupdict().items() if v})
                has_sign = has_sign or sign.cause.level != "context"
        return has_sign

    def _note(self, cause: Cause, number: int, text: str, rank: int | None, fields: dict[str, str]) -> None:
        if rank is None and (word := _RANK_WORD.search(text)):
            rank = int(word[1])
        if cause.id.startswith("device-oom"):
            fields["message"] = text[:_LONGEST_MESSAGE]
        self.scan.sightings.append(
            Sighting(
                cause=cause,
                place=f"{self.scan.name}:{number}",
                text=shown(text),
                order=number,
                log=self.scan.name,
                rank=rank if rank is not None else self.scan.rank,
                fields=fields,
                frames=tuple(self._frames.get(rank, self._frames.get(None, ()))),
                losses_before=self.scan.losses.count,
            )
        )

    def _stack(self, body: str, rank: int | None) -> bool:
        """Take a line of a traceback; say whether it was one."""
        if body.startswith("Exception ignored in"):
            self._ignored.add(rank)
        elif "Traceback (most recent call last)" in body:
            self._frames[rank] = deque(maxlen=60)
            if rank not in self._ignored:
                self._in_traceback.add(rank)
            self._ignored.discard(rank)
        elif frame := _FRAME.match(body):
            if rank not in self._frames:  # the log begins within a traceback
                self._frames[rank] = deque(maxlen=60)
                self._in_traceback.add(rank)
            self._frames[rank].append(StackFrame(frame["file"], int(frame["line"]), frame["function"]))
        else:
            return False
        return True

    def _figures(self, number: int, line: str, rank: int | None) -> None:
        self._progress(line, rank)
        self._first_failure(line)
        self._end(number, line)
        self.scan.meters.read(line)
        if "MiB" in line and (listed := _GPU_PROCESS.match(line)):
            pid, mib = (group for group in listed.groups() if group is not None)
            self.scan.gpu_processes.append((int(pid), int(mib) / 1024))
        for name, fact in FACTS.items():
            if name not in self.scan.facts and (match := fact.search(line)):
                self.scan.facts[name] = next((group for group in match.groups() if group), match[0])

    def _progress(self, line: str, rank: int | None) -> None:
        """Take how far the run, or one of its ranks, says it is."""
        if rank is not None and "/" in line and (batch := _BATCH_OF.search(line)):
            self.scan.batches[rank] = (int(batch[1]), int(batch[2]))
        if rank is not None and (whole := _BATCHES.search(line)):
            self.scan.batches[rank] = (int(whole[1]), int(whole[1]))
        if "/" in line and (step := _STEP.search(line)) and not _PREPARING.match(line):
            self.scan.step = int((step[1] or step[3]).replace(",", ""))

    def _first_failure(self, line: str) -> None:
        """Take which rank failed first, and the pids of ranks, from what torchrun and torch's `spawn` sum up."""
        if summary := _ROOT_RANK.match(line):
            self._summary_rank = int(summary[1])
            if self._in_summary:
                self.scan.root_rank, self._in_summary = self._summary_rank, False
        elif exited := _EXITED.match(line):
            self.scan.ranks_by_pid[exited[1]] = self._summary_rank
        self._in_summary = self._in_summary or _ROOT in line
        if spawned := _SPAWNED.search(line):
            self.scan.root_rank = int(spawned[1])

    def _end(self, number: int, line: str) -> None:
        if COMPLETED.search(line):
            self.scan.completed_at = number
        if _ENDED_WELL.search(line):
            self.scan.ended_well_at = number
        if "process group has NOT been destroyed before" in line:
            self.scan.left_at = number


def _rank_and_body(line: str) -> tuple[int | None, str]:
    """Return the rank that stands before a line, and the line without it and without a collector's stamp."""
    stamp = _STAMP.match(line)
    begin = stamp.end() if stamp else 0
    prefix = _RANK.match(line, begin)
    if prefix is None:
        return None, line[begin:]
    return int(next(filter(None, prefix.groups()))), line[prefix.end() :]


def _may_tell_a_loss(shape: bytes) -> bool:
    """Whether a line of which this is left without its digits a to f may tell a loss, or a NaN."""
    return b"oss" in shape or b"nn" in shape or b"NN" in shape


def _in_short(kind: str, said: str | None) -> str:
    return shown(f"{kind.rsplit('.', 1)[-1]}{said or ''}", 120)


def scan_log(path: Path, name: str, exception: Cause, rank: int | None = None) -> Scan:
    """Read one log; `exception` is the cause that stands for an exception without a sign of its own."""
    if rank is None and (of_file := _RANK_OF_FILE.search(str(path))):
        rank = int(of_file[1] or of_file[2])
    return scan_blocks(blocks_of(path), name, exception, rank)


def scan_blocks(
    blocks: Iterable[tuple[Sequence[int], list[bytes]]], name: str, exception: Cause, rank: int | None = None
) -> Scan:
    """Read blocks of numbered lines as `scan_log` does those of a file."""
    scan = Scan(name, rank)
    reader = _Reader(scan, exception)
    for numbers, lines in blocks:
        if lines:
            reader.read(numbers, lines)
            scan.lines = numbers[-1]
    return scan
