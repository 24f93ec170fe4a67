"""What an evaluation file asks: which model, which questions, which policies; read like a job, with the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, model_validator

from trainwright.evaluate.engines.engine import Dtype, EngineName
from trainwright.evaluate.mdp import DecisionProcess, Sigma, preset
from trainwright.evaluate.retrieval.passages import CHUNK_WORDS, OVERLAP_WORDS
from trainwright.job.loading import validated
from trainwright.job.origins import Origin
from trainwright.job.overrides import with_overrides, with_values
from trainwright.job.schema import NAME_PATTERN, NonNegativeInt, PositiveInt, Section
from trainwright.job.shape import FileKind
from trainwright.job.yaml_document import Document, read_file, read_keys

ESTIMATED = "estimated"
GUIDE = preset("guide")
DEFAULT_MODEL = "Qwen/Qwen2.5-7B-Instruct"
DEFAULT_QUESTIONS = 100
DEFAULT_FIXED_K = 3
"""These three and medium, auto and 42 are what the guide's programs take where nothing is said (S3-08)."""

FieldName = Literal["id", "question", "choices", "answer", "difficulty", "gold_passages", "search"]


class QuestionsSection(Section):
    """The questions."""

    path: str | list[str]
    """A file, the folder of ORAN-Bench-13K, or a list of these."""
    format: Literal["auto", "jsonl", "json", "csv", "parquet"] = "auto"
    """What the files are; `auto` goes by the end of their names."""
    fields: dict[FieldName, str] = Field(default_factory=dict)
    """Names of the columns, where they are others: `{question: prompt, answer: label}`."""
    first_choice: Literal[0, 1] | None = None
    """The number by which an answer means the first choice, where the file leaves it open."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files and folders."""
        return tuple(map(Path, [self.path] if isinstance(self.path, str) else self.path))


class ProcessSection(Section):
    """The decision process: what U gains by a step, and what steps cost."""

    delta_r: float
    """What a successful retrieval adds to U."""
    delta_p: float
    """What a reasoning adds to U."""
    p_s: float
    """Probability that a retrieval succeeds."""
    c_r: float = 0.10
    """Cost of a retrieval."""
    c_p: float = 0.05
    """Cost of a reasoning."""
    mu: float = 0.6
    """Weight of cost against the worth of the answer."""
    gamma: float = 0.98
    """Discount of each further action."""
    sigma: Literal["linear", "sqrt", "saturating", "sigmoid"] = "linear"
    """The form of the worth of an answer at U."""
    sigma_k: float = 5.0
    """Steepness of the sigmoid, or decay rate of the saturating form."""
    shaping_k: float = 0.0
    """Adds gamma Phi(U') - Phi(U) to each reward, with Phi(U) = shaping_k U."""


class RetrievalSection(Section):
    """Where passages come from."""

    corpus: str
    """A folder of text files, or a .jsonl file of rows with a text."""
    method: Literal["bm25", "dense", "hybrid"] = "bm25"
    """How they are found: by their words, by the nearness of embeddings, or by both, fused by rank."""
    encoder: str | None = None
    """What embeds, for dense and hybrid: a folder that sentence-transformers saved, or a name of the hub."""
    k: PositiveInt = 3
    """Passages that one retrieval brings."""
    passage_words: PositiveInt = CHUNK_WORDS
    """Longer documents are cut into passages of so many words."""
    overlap_words: NonNegativeInt = OVERLAP_WORDS
    """Words that a passage repeats of the one before it."""
    success: Literal["new", "covered"] = "new"
    """When a retrieval succeeds: it brings a passage that is new; or, with it, the passages hold every word of the
    question that the corpus has."""
    cache_dir: str | None = None
    """Where the index is kept; `~/.cache/trainwright` when left out."""

    @model_validator(mode="after")
    def _encoder_is_for_embeddings(self) -> RetrievalSection:
        if self.method == "bm25" and self.encoder is not None:
            raise ValueError("`encoder` has no effect with bm25: add `method: dense` or `method: hybrid`")
        if self.method != "bm25" and self.encoder is None:
            raise ValueError(f"`{self.method}` needs `encoder`: a folder, or a name of the hub")
        return self


class CalibrationSection(Section):
    """How the decision process is estimated, where it is: from questions that are set aside and not asked again."""

    questions: PositiveInt = 50
    """How many are set aside."""
    retrievals: PositiveInt = 5
    """Of each; it is answered before the first and after every one."""
    c_r: float = GUIDE.c_r
    """Cost of a retrieval, which no measurement can know."""
    c_p: float = GUIDE.c_p
    """Cost of a reasoning."""
    mu: float = GUIDE.mu
    """Weight of cost against the worth of the answer."""
    gamma: float = GUIDE.gamma
    """Discount of each further action."""


class EvalConfig(Section):
    """One evaluation: everything that decides its results, and where it runs."""

    model: str = DEFAULT_MODEL
    """A folder in the Hugging Face format, or a name of the hub."""
    revision: str | None = None
    """Revision on the hub; a 40-digit commit pins the weights."""
    data: QuestionsSection | str
    """The questions: a path, or a section."""
    n_questions: PositiveInt | Literal["all"] = DEFAULT_QUESTIONS
    """How many are asked; all where there are fewer and nothing is said."""
    difficulty: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """easy, medium, hard, or mixed for each in its proportion; medium where the data has it, else mixed."""
    seed: StrictInt = 42
    """Chooses the questions, and gives each its luck, the same for every policy."""
    policies: list[str] | None = None
    """What decides when to retrieve, reason and answer: `mdp`, `fixed:3`, ...; several are compared."""
    process: str | ProcessSection = "guide"
    """The decision process: a named set (guide, base, spec, head), its parameters, or `estimated`; its costs are those
    of the run."""
    calibration: CalibrationSection = Field(default_factory=CalibrationSection)
    """What `process: estimated` goes by."""
    retrieval: RetrievalSection | Literal["none"] = "none"
    """Where passages come from; without it no policy can retrieve."""
    gpu_mode: Literal["auto", "single", "data_parallel", "accelerate"] = "auto"
    """One GPU, a copy of the model on each, or its layers over several."""
    gpu_ids: list[NonNegativeInt | str] | Literal["all"] = "all"
    """The GPUs, by number or UUID."""
    gpus_per_replica: PositiveInt | Literal["auto"] = "auto"
    """GPUs that hold one copy of the model; `auto`: as few as it takes."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Copies of the model where there is no GPU, one process each."""
    engine: EngineName | Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = "auto"
    """What runs the model; `auto`: vllm where it is installed and there is a GPU; or `module:Class` of your own."""
    chat_template: bool | Literal["auto"] = "auto"
    """Whether prompts are put as the model's chat; `auto`: where its tokenizer has a template."""
    batch_size: PositiveInt | Literal["auto"] = "auto"
    """Prompts at a time; `auto` takes as many as memory holds."""
    prompt_template: str | None = None
    """A prompt of your own, with `{question}`, `{choices}`, `{passages}`, `{facts}` and `{earlier}` in it."""
    max_new_tokens: PositiveInt = 64
    """The longest answer, in tokens."""
    dtype: Dtype = "auto"
    """The numbers that the model computes in."""
    output_dir: str = "."
    """The folder in which `results/` is made."""

    @property
    def questions(self) -> QuestionsSection:
        """The data, as a section."""
        return QuestionsSection(path=self.data) if isinstance(self.data, str) else self.data

    @property
    def decision_process(self) -> DecisionProcess:
        """The process of the policies, as far as it is known before the estimate.

        Raises:
            UserError: there is no such set, or the values are outside their range.
        """
        if self.process == ESTIMATED:
            assumed = self.calibration
            return replace(GUIDE, c_r=assumed.c_r, c_p=assumed.c_p, mu=assumed.mu, gamma=assumed.gamma)
        if isinstance(self.process, str):
            return preset(self.process)
        return DecisionProcess(**{**self.process.model_dump(), "sigma": Sigma(self.process.sigma)})


EVALUATION = FileKind(
    noun="evaluation",
    model=EvalConfig,
    example="model: Qwen/Qwen2.5-7B-Instruct",
    renamed={
        "fixed_k": "write `policies: [fixed:3]`",
        "max_memory": "what is free on each GPU is read when the model is loaded",
        "trust_remote_code": "code from a model hub is never run",
        "dataset": "it is `data` here",
    },
)


def load_evaluation(
    source: str | None, overrides: Sequence[str] = (), flags: Mapping[str, tuple[str, Any]] | None = None
) -> EvalConfig:
    """Return the evaluation of a file, or of nothing, with flags laid over it and overrides over these.

    `flags` are keys with the flag that set them and its value. Raises UserError with all problems at once, each with
    its place.
    """
    document = Document(values={})
    if source is not None:
        text = read_file(Path(source), EVALUATION.noun)
        document = read_keys(text, lambda line, column: Origin("file", f"{source}:{line}:{column}"), EVALUATION.example)
    if document.readable:
        values = {key: (Origin("override", flag), value) for key, (flag, value) in (flags or {}).items()}
        document = with_overrides(with_values(document, values), overrides)
    return validated(source or "the command line", document, EVALUATION)
