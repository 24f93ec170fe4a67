"""What is asked, turned into questions and policies, before any model is loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import UserError
from trainwright.evaluate.batch_loop import nothing_to_retrieve
from trainwright.evaluate.eval_config import DEFAULT_QUESTIONS, ESTIMATED, EvalConfig, RetrievalSection
from trainwright.evaluate.expectation import expect
from trainwright.evaluate.mdp import DecisionProcess
from trainwright.evaluate.policies import PolicyEntry
from trainwright.evaluate.policy_names import SPELLINGS, strategy
from trainwright.evaluate.prompts import check_template
from trainwright.evaluate.questions.question import Question, QuestionSet
from trainwright.evaluate.questions.question_files import read_questions
from trainwright.evaluate.questions.selection import MIXED, select
from trainwright.evaluate.results import Lines, results_path
from trainwright.evaluate.retrieval.passages import Chunking
from trainwright.evaluate.retrieval.retriever import prepare
from trainwright.hardware.choice import Choice
from trainwright.hardware.local import local_inventory
from trainwright.hardware.selection import cuda_environment, select_devices

GUIDE_DIFFICULTY = "medium"
TOKENS_PER_WORD = 1.5
"""Of English prose; WordPiece and BPE vocabularies of 30,000 and more take 1.2 to 1.4."""


@dataclass(frozen=True)
class Prepared:
    """Everything that is decided before the devices are looked at."""

    asked: EvalConfig
    everything: QuestionSet
    questions: tuple[Question, ...]
    """Those that are asked."""
    difficulty: str
    process: DecisionProcess
    strategies: tuple[PolicyEntry, ...]
    retrieval: Mapping[str, Any] | None
    """How a worker opens the retriever, and how many passages there are."""
    choices: Mapping[str, Choice[Any]]

    @property
    def results(self) -> Path:
        """Where the guide puts the results."""
        model = Path(self.asked.model)
        name = str(model.resolve()) if model.is_dir() else self.asked.model
        where = results_path(name, self.difficulty, len(self.questions), self.strategies)
        return Path(self.asked.output_dir) / where

    @property
    def lines(self) -> Lines:
        """Where answers are kept as they come."""
        return Lines(self.results)

    @property
    def tokens(self) -> int:
        """An estimate of the longest prompt with its answer."""
        asked = self.asked
        words = max(len(f"{question.text} {' '.join(question.choices)}".split()) for question in self.questions)
        if isinstance(asked.retrieval, RetrievalSection):
            most = max(math.ceil(_retrievals(one)) for one in self.strategies)
            words += most * asked.retrieval.k * asked.retrieval.passage_words
        return int(words * TOKENS_PER_WORD) + 100 + asked.max_new_tokens

    def settings(self, dtype: str) -> dict[str, Any]:
        """Return all that the answers hang on: lines of other settings are never mixed with this run's."""
        asked = self.asked
        retrieval: dict[str, Any] | None = None
        if self.retrieval is not None:
            assert isinstance(asked.retrieval, RetrievalSection)
            retrieval = {"method": asked.retrieval.method, "k": asked.retrieval.k, "success": asked.retrieval.success}
            retrieval |= {
                key: Path(self.retrieval[key]).name for key in ("folder", "embeddings") if key in self.retrieval
            }
        asked_for = repr([asdict(question) for question in self.questions])
        return {
            "model": asked.model,
            "revision": asked.revision,
            "model_files": _model_files(Path(asked.model)),
            "questions": hashlib.sha256(asked_for.encode("utf-8", "surrogatepass")).hexdigest(),
            "seed": asked.seed,
            "process": asdict(self.process),
            "retrieval": retrieval,
            "engine": asked.engine,
            "chat_template": asked.chat_template,
            "prompt_template": asked.prompt_template,
            "max_new_tokens": asked.max_new_tokens,
            "dtype": dtype,
        }


def prepare_evaluation(asked: EvalConfig, process: DecisionProcess | None = None) -> Prepared:
    """Read the questions, choose those to ask, and make the policies; `process` is the estimate, where there is one.

    Raises:
        UserError: files are missing or wrong, a policy cannot be, or wants to retrieve where there is no corpus.
    """
    return _prepare(asked, process or asked.decision_process, aside=False)


def prepare_calibration(asked: EvalConfig) -> Prepared:
    """Return the evaluation that the process is estimated from: the probe, on the questions that are set aside.

    Raises:
        UserError: as `prepare_evaluation`, and where there is no corpus to retrieve from.
    """
    probe = f"probe:{asked.calibration.retrievals}"
    folder = str(Path(asked.output_dir) / "results" / "calibration")
    return _prepare(
        asked.model_copy(update={"policies": [probe], "output_dir": folder}), asked.decision_process, aside=True
    )


def _prepare(asked: EvalConfig, process: DecisionProcess, *, aside: bool) -> Prepared:
    choices: dict[str, Choice[Any]] = {}
    if asked.prompt_template is not None:
        check_template(asked.prompt_template)
    strategies = _strategies(asked, process, choices)
    data = asked.questions
    everything = read_questions(
        *data.paths,
        first_choice=data.first_choice,
        fields={str(ours): theirs for ours, theirs in data.fields.items()},
        suffix=None if data.format == "auto" else f".{data.format}",
    )
    difficulty = asked.difficulty or _difficulty(everything, choices)
    open_to_all: Sequence[Question] = everything.questions
    set_aside: list[Question] = []
    if asked.process == ESTIMATED:
        set_aside = select(open_to_all, n=asked.calibration.questions, difficulty=difficulty, seed=asked.seed)
        kept = {question.id for question in set_aside}
        open_to_all = [question for question in open_to_all if question.id not in kept]
    questions = set_aside
    if not aside:
        count = _count(asked, open_to_all, difficulty, choices)
        questions = select(open_to_all, n=count, difficulty=difficulty, seed=asked.seed)
    retrieval = None
    if isinstance(asked.retrieval, RetrievalSection):
        wanted = asked.retrieval
        chunking = Chunking(wanted.passage_words, wanted.overlap_words)
        cache = Path(wanted.cache_dir or "~/.cache/trainwright").expanduser()
        environment = None
        if wanted.encoder is not None and asked.gpu_ids != "all":
            environment = cuda_environment(select_devices(local_inventory(), asked.gpu_ids))
        retrieval = prepare(
            wanted.method, Path(wanted.corpus), chunking, cache, encoder=wanted.encoder, environment=environment
        )
    return Prepared(asked, everything, tuple(questions), difficulty, process, strategies, retrieval, choices)


def _strategies(
    asked: EvalConfig, process: DecisionProcess, choices: dict[str, Choice[Any]]
) -> tuple[PolicyEntry, ...]:
    names = asked.policies
    if names is None:
        if asked.retrieval == "none":
            choices["policies"] = Choice("no-retrieval", "no corpus is named (retrieval.corpus), so none can retrieve")
        else:
            choices["policies"] = Choice("mdp", "the default")
        names = [choices["policies"].value]
    if not names or len(set(names)) < len(names):
        raise UserError("policies must be named, each once", hints=[f"policies: {', '.join(SPELLINGS)}"])
    strategies = tuple(strategy(name, process) for name in names)
    if asked.retrieval == "none":
        for one in strategies:
            if _retrievals(one):
                raise nothing_to_retrieve(one.name)
    return strategies


def _retrievals(one: PolicyEntry) -> float:
    """Return how many retrievals a policy is expected to make; what a user's own does shows when it runs."""
    ours = one.family.replace("_", "-") in {spelling.partition("[")[0].partition(":")[0] for spelling in SPELLINGS}
    return expect(one, draws=(0.25, 0.75)).retrievals if ours else 0.0


def _difficulty(everything: QuestionSet, choices: dict[str, Choice[Any]]) -> str:
    difficulties = {question.difficulty for question in everything.questions}
    chosen = GUIDE_DIFFICULTY if GUIDE_DIFFICULTY in difficulties else MIXED
    why = "the default" if chosen == GUIDE_DIFFICULTY else "no question is marked as medium, the default"
    choices["difficulty"] = Choice(chosen, why)
    return chosen


def _count(
    asked: EvalConfig, questions: Sequence[Question], difficulty: str, choices: dict[str, Choice[Any]]
) -> int | None:
    if asked.n_questions == "all":
        return None
    if "n_questions" in asked.model_fields_set:
        return asked.n_questions
    available = sum(difficulty in (MIXED, question.difficulty) for question in questions)
    if 0 < available < DEFAULT_QUESTIONS:
        choices["n_questions"] = Choice(available, f"all there are, fewer than the default of {DEFAULT_QUESTIONS}")
        return None
    choices["n_questions"] = Choice(DEFAULT_QUESTIONS, "the default")
    return DEFAULT_QUESTIONS


def _model_files(folder: Path) -> list[list[Any]] | None:
    """Return name, size and time of a local model's files: weights that were trained again are another model."""
    if not folder.is_dir():
        return None
    files = sorted(path for pattern in ("*.json", "*.safetensors") for path in folder.glob(pattern))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
