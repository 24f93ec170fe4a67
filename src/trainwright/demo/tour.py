"""The demo from start to end: data, training with a stop and a resume in the middle, questions, what to try next.

It goes through the front door: each training is a `trainwright train` of its own, as a user would type it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.demo.files import FACTS_IN_A_QUESTION, QUESTIONS, STEPS, TRAINING_ROWS, DemoFolder
from trainwright.errors import ExitCode
from trainwright.launch.processes import Processes
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import StopAsked
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read

STOP_AT_STEP = STEPS // 2
ENOUGH = 0.8
"""Exact match from which on the model counts as having learned to answer."""
SHOWN = 3
POLL_S = 0.1
PYTHON = Path(sys.executable)
TRAINWRIGHT, TENSORBOARD = PYTHON.with_name("trainwright"), PYTHON.with_name("tensorboard")
# Offline, and without transformers' advice on kernels for GPUs.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Answer:
    """A question with what the model said; `story` is None where it was asked without one."""

    story: str | None
    question: str
    right_answer: str
    answer: str


def run_demo(output_dir: Path, seed: int) -> ExitCode:
    """Make a model that answers, stop and resume on the way, and ask it.

    Returns DONE if it answers at least 80 % of the held-out questions, FAILED if it did not learn, STOPPED when the
    user stopped the demo, and otherwise what `trainwright train` ended with.
    """
    began_s = time.monotonic()
    folder = DemoFolder(output_dir)
    stop = StopAsked()
    with stop.listening():
        _write_data(folder, seed)
        code = _train_with_a_stop(folder, stop)
        if code is ExitCode.DONE and not stop.times:
            code = _ask(folder, stop)
    if stop.times:
        tell("")
        tell(f"Stopped. To go on with the training: {_command(TRAINWRIGHT, 'train', folder.base_job)}")
        return ExitCode.STOPPED
    if code is not ExitCode.DONE:
        return code
    answers = read_answers(folder.answers)
    _show(answers)
    if exact_match(answers, with_story=True) < ENOUGH:
        tell("")
        tell(f"error: the model did not learn to answer: exact match is below {ENOUGH:g}; try another --seed")
        return ExitCode.FAILED
    _show_next(folder, time.monotonic() - began_s)
    return ExitCode.DONE


def _write_data(folder: DemoFolder, seed: int) -> None:
    _heading("1. A data set")
    folder.write(seed)
    tell(f"{TRAINING_ROWS:,} small stories with questions are in {_shown(folder.stories)}.")
    tell(f"{QUESTIONS} more are kept for the end; no fact in them is told anywhere in the training data.")
    tell(f"The job file {_shown(folder.base_job)} says what to train on them, and how.")


def _train_with_a_stop(folder: DemoFolder, stop: StopAsked) -> ExitCode:
    _heading("2. Training, and a stop in the middle")
    tell("A tokenizer and a small model, both from nothing, on two processes that share the work.")
    code = _train(folder, stop, stop_at_step=STOP_AT_STEP)
    if stop.times or code is not ExitCode.STOPPED:
        return code
    tell(f"It ended with exit code {int(code)}: stopped cleanly, run again.")
    _heading("3. The same command again goes on from there")
    return _train(folder, stop)


def _train(folder: DemoFolder, stop: StopAsked, *, stop_at_step: int | None = None) -> ExitCode:
    """Run `trainwright train`; at `stop_at_step` send it the SIGTERM that a cluster sends when the time is up.

    The first call, which has a step to stop at, begins anew: it sets the run of a former demo aside.
    """
    former_run = folder.run.run_id if stop_at_step is not None and folder.run.path.exists() else None
    flags = ["--fresh"] if former_run is not None else []
    tell(f"$ {_command(TRAINWRIGHT, 'train', folder.base_job, *flags)}")
    # A session of its own: Ctrl+C reaches this process alone, which passes it on once.
    child = subprocess.Popen(
        [sys.executable, "-m", "trainwright", "train", str(folder.base_job), *flags],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    passed_on = 0
    try:
        while child.poll() is None:
            if stop.times > passed_on:
                passed_on += 1
                child.send_signal(signal.SIGINT)  # the one that counts each time, as here
            elif stop_at_step is not None and _steps_done(folder.run, former_run) >= stop_at_step:
                stop_at_step = None
                tell(f"The demo now stops it, as a cluster would when the time is up: SIGTERM to process {child.pid}.")
                child.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
    finally:
        child.kill()
        child.wait()
    return ExitCode(child.returncode) if child.returncode in set(ExitCode) else ExitCode.FAILED


def _steps_done(run: RunFolder, former_run: str | None) -> int:
    """Return how far the run is; 0 while its folder still holds the former one."""
    if not run.run_json.exists() or run.run_id == former_run:
        return 0
    return max((record["step"] for record in read(run.metrics_jsonl)), default=0)


def _ask(folder: DemoFolder, stop: StopAsked) -> ExitCode:
    _heading("4. Does it answer?")
    tell(f"{QUESTIONS} questions on held-out facts, {FACTS_IN_A_QUESTION} in each story; then without the story.")
    module = "trainwright.train.answer_prompts"
    paths = [folder.run.final_model_dir, folder.questions, folder.answers]
    tell(f"$ {_command(PYTHON, '-m', module, *paths)}")
    folder.answers_log.write_bytes(b"")
    processes = Processes()
    try:
        processes.start(module, [*map(str, paths)], ENVIRONMENT, folder.answers_log)
        while processes.running and not stop.times:
            time.sleep(POLL_S)
    finally:
        processes.kill()
    if stop.times or processes.exit_codes() == [0]:
        return ExitCode.STOPPED if stop.times else ExitCode.DONE
    tell(folder.answers_log.read_text(errors="replace"))
    tell("error: the model could not be asked")
    return ExitCode.FAILED


def _show(answers: list[Answer]) -> None:
    with_story = [answer for answer in answers if answer.story is not None]
    for answer in with_story[:SHOWN]:
        print()
        print(f"Story:        {answer.story}")
        print(f"Question:     {answer.question}")
        print(f"The model:    {answer.answer}")
        print(f"Right answer: {answer.right_answer}")
    print()
    for label, flag in (("with the story", True), ("without the story", False)):
        print(f"exact match {label + ':':19} {exact_match(answers, with_story=flag):.3f}")
    sys.stdout.flush()


def _show_next(folder: DemoFolder, took_s: float) -> None:
    _heading("What to try next")
    lora_answers = folder.path / "answers-lora.jsonl"
    lora_model = folder.lora_run.final_model_dir
    for what, command in (
        ("Every setting, with where it comes from", _command(TRAINWRIGHT, "config", "show", folder.base_job)),
        ("LoRA on the model you just made: it learns short answers", _command(TRAINWRIGHT, "train", folder.lora_job)),
        (
            "Ask the model with the adapter",
            _command(PYTHON, "-m", "trainwright.train.answer_prompts", lora_model, folder.questions, lora_answers),
        ),
        ("The log of each process", f"ls {_shown(folder.run.latest_logs)}"),
        ("The loss as a curve", _command(TENSORBOARD, "--logdir", folder.run.logs_dir)),
    ):
        tell(f"{what}:\n    {command}")
    tell("")
    tell(f"All of it is in {_shown(folder.path)}; the demo took {took_s:.0f} s.")


def _heading(text: str) -> None:
    tell(f"\n{text}\n{'-' * len(text)}")


def _command(program: Path, *arguments: str | Path) -> str:
    """Return the line to type here and now: the program's bare name if the shell finds this very one by it."""
    on_path = shutil.which(program.name)
    name = program.name if on_path is not None and Path(on_path) == program else _shown(program)
    return " ".join([name, *map(_shown, arguments)])


def _shown(argument: str | Path) -> str:
    """Return an argument for the shell; a path below this folder is shortened."""
    if isinstance(argument, Path) and argument.is_absolute() and argument.is_relative_to(Path.cwd()):
        argument = argument.relative_to(Path.cwd())
    return shlex.quote(str(argument))


def read_answers(path: Path) -> list[Answer]:
    """Return the answers in a file that `trainwright.train.answer_prompts` wrote."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Answer(row["story"], row["question"], row["right_answer"], row["answer"]) for row in rows]


def exact_match(answers: Sequence[Answer], *, with_story: bool) -> float:
    """Return the share of answers that are the right one to the letter, of those asked with a story or without."""
    asked = [answer for answer in answers if (answer.story is not None) == with_story]
    return sum(answer.answer == answer.right_answer for answer in asked) / len(asked)
