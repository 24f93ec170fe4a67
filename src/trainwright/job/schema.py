"""The Job: what a user wants, whatever the hardware.

Names follow Hugging Face's `TrainingArguments` and peft's `LoraConfig` where they exist. `auto` marks a value that
the plan chooses and gives a reason for. Values are strict: `true` is not 1, `3.0` is not 3 and `"3"` is no number.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from trainwright.job import placeholders
from trainwright.job.documentation import document

Auto = Literal["auto"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
PositiveInt = Annotated[StrictInt, Field(gt=0)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Percent = Annotated[float, Field(ge=0, le=100)]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
_INTERVAL = re.compile(r"^(\d{1,9}(?:\.\d{1,9})?) +(epochs?|steps?)$", re.ASCII)
_TASK = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

BUILT_IN_TASKS = ("causal-lm", "seq2seq")
TEMPLATES = ("auto", "chat", "plain", "none")
PLANNED_TASKS = ("framer-lora", "ct-clip", "speech-lora")
"""Tasks that presets name and this version cannot run yet; `train` says so."""


class Section(BaseModel):
    """A part of the job; unknown keys are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, json_schema_extra=document)


class Interval(Section):
    """How often something happens: a number of epochs (fractions allowed) or of optimizer steps."""

    value: float
    unit: Literal["epoch", "step"]

    @staticmethod
    def parse(text: object) -> object:
        """Read `1 epoch`, `0.5 epochs` or `200 steps`; anything else is a ValueError that shows the three forms."""
        if isinstance(text, Interval):
            return text
        match = _INTERVAL.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError("write an interval as `1 epoch`, `0.5 epochs` or `200 steps`")
        value = float(match[1])
        unit: Literal["epoch", "step"] = "epoch" if match[2].startswith("epoch") else "step"
        if value <= 0 or (unit == "step" and value != int(value)):
            raise ValueError("an interval is a positive number of epochs or a positive whole number of steps")
        return Interval(value=value, unit=unit)

    def __str__(self) -> str:
        plural = "" if self.value == 1 else "s"
        # Not `:g`, which would write a million steps as 1e+06, and that is read back as no interval.
        return f"{f'{self.value:.9f}'.rstrip('0').rstrip('.')} {self.unit}{plural}"


Every = Annotated[
    Interval,
    BeforeValidator(Interval.parse),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {"type": "string", "pattern": _INTERVAL.pattern, "examples": ["1 epoch", "0.5 epochs", "200 steps"]}
    ),
]


def _with_known_placeholders(element: str) -> str:
    problem = placeholders.problem_of(element)
    if problem is not None:
        raise ValueError(problem)
    return element


Argument = Annotated[str, Field(max_length=30_000), AfterValidator(_with_known_placeholders)]
"""One argument of a command. The kernel takes 131,071 bytes (MAX_ARG_STRLEN), and a character has at most four."""


def _is_template(text: str) -> str:
    if text not in TEMPLATES and text.count("{prompt}") != 1:
        raise ValueError(f"write {', '.join(TEMPLATES)}, or a text with `{{prompt}}` in it once")
    if "{response}" in text:
        raise ValueError("leave `{response}` out: the response follows the text")
    return text


class FromScratch(Section):
    """A model built from dimensions alone, with random weights."""

    architecture: str
    """Model type as in a Hugging Face `config.json`: `llama`, `qwen2`, `gpt2`, `t5`, ..."""
    dimensions: dict[str, StrictInt | float | bool | str | list[StrictInt | str] | None] = Field(default_factory=dict)
    """Fields of that architecture's config, such as `hidden_size` or the list `layer_types`; the vocabulary size
    follows the tokenizer."""


class TrainTokenizer(Section):
    """A byte-level BPE tokenizer trained on the training data."""

    vocab_size: Annotated[StrictInt, Field(ge=300)] = 8192
    """Size of the vocabulary, special tokens included; at least 300 (256 bytes and the special tokens)."""


class ModelSection(Section):
    """Which model to train: a hub name, a local folder, or one made from scratch."""

    name: str | None = None
    """Hub name (`Qwen/Qwen2.5-0.5B`) or a local folder in the Hugging Face format; weights must be safetensors."""
    revision: str | None = None
    """Hub revision; a 40-digit commit pins the weights."""
    from_scratch: FromScratch | None = None
    """Architecture and dimensions of a new model; give this or `name`."""
    tokenizer: str | TrainTokenizer | None = None
    """Tokenizer folder or hub name, or `{vocab_size: 8192}` to train one; the model's own when left out."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernel; `auto` leaves the choice to transformers."""

    @property
    def is_named(self) -> bool:
        """Whether the job says which model; only one with a script of its own may leave it out."""
        return self.name is not None or self.from_scratch is not None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if self.name is not None and self.from_scratch is not None:
            raise ValueError("give either `name` (a hub name or a folder) or `from_scratch`, not both")
        if self.from_scratch is not None and self.tokenizer is None:
            raise ValueError("a model from scratch needs `tokenizer`: a folder, or `{vocab_size: 8192}` to train one")
        return self


class DataSection(Section):
    """Where the examples are and how they become token sequences; paths count from the current directory."""

    path: str | None = None
    """Training data: a jsonl, json, csv or parquet file, a `datasets` folder, or a hub name; presets leave it out."""
    eval_path: str | None = None
    """Evaluation data, in any of the same forms."""
    eval_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training data set aside for evaluation, chosen by `train.seed`; 0 for none."""
    split: str = "train"
    """Split to take from a hub data set."""
    columns: dict[Literal["prompt", "response", "text", "messages"], str] = Field(default_factory=dict)
    """Which column holds what; found by name when left out."""
    template: Annotated[str, AfterValidator(_is_template)] = "auto"
    """How a prompt and its response are put together: `chat` (the tokenizer's chat template, as the user's and the
    assistant's message), `plain` (prompt, line break, response), `none` (nothing between them), or a text of your own
    with `{prompt}` in it, which the response follows. `auto`: `chat` where the tokenizer has a chat template, else
    `plain`; for `seq2seq` else `none`."""
    loss_on: Literal["response", "all"] = "response"
    """Which tokens are learned: the answers only, or every token; plain text is always learned whole."""
    max_length: PositiveInt = 1024
    """Longest sequence in tokens; for `seq2seq`, of the prompt and of the response each."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a longer example; what was done is counted and printed."""
    packing: bool = False
    """Fill sequences with several examples, kept apart by position ids and attention."""
    limit: PositiveInt | None = None
    """Use only the first N examples."""
    cache_dir: str | None = None
    """Folder of the tokenized data; `~/.cache/trainwright` when left out."""


class MethodSection(Section):
    """What is trained: all weights, or adapters beside frozen ones."""

    type: Literal["full", "lora", "qlora"] = "full"
    """`full` trains the weights themselves, `lora` low-rank adapters, `qlora` adapters on a 4-bit nf4 base."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns of parameter names that stay as they are (`shared.*`, `encoder.*`); with `full` only."""
    r: PositiveInt = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters; the update is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapters."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Modules that get an adapter: `all-linear`, or names such as `[q_proj, v_proj]`."""
    adapter: str | None = None
    """Folder or hub name of an adapter to go on from, instead of a new one."""
    merge: bool = False
    """Also write the model with the adapters merged in, as `final_model/merged`."""

    @model_validator(mode="after")
    def _freeze_is_for_full(self) -> MethodSection:
        if self.freeze and self.type != "full":
            raise ValueError(f"`freeze` has no effect with `{self.type}`: the base is frozen already; remove it")
        return self


class TrainSection(Section):
    """The schedule: what is learned from, how often and how fast, whatever the hardware."""

    global_batch_size: PositiveInt = 32
    """Examples in one optimizer step, over all GPUs; kept whatever the hardware."""
    micro_batch_size: PositiveInt | Auto = "auto"
    """Examples in one forward pass on one GPU."""
    gradient_accumulation_steps: PositiveInt | Auto = "auto"
    """Forward passes in one optimizer step; follows from the two others and the number of GPUs."""
    num_train_epochs: Annotated[float, Field(gt=0)] = 3.0
    """Passes over the data; fractions allowed."""
    max_steps: PositiveInt | None = None
    """Optimizer steps; wins over `num_train_epochs`."""
    learning_rate: PositiveFloat | Auto = "auto"
    """Peak learning rate; `auto` goes by the method: 2e-4 for `lora` and `qlora`, 2e-5 for `full`, 3e-4 for a model
    from scratch."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate with global_batch_size / lr_scaling_base; advice is printed either way."""
    lr_scaling_base: PositiveInt | None = None
    """Global batch for which `learning_rate` was chosen; needed by `lr_scaling`."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "one_cycle"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: Annotated[float, Field(ge=0)] = 0.0
    """Optimizer steps of warm-up; below 1 a share of the whole run."""
    min_lr_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Where `linear` and `cosine` end, as a share of the peak."""
    one_cycle_div_factor: Annotated[float, Field(gt=1)] = 25.0
    """`one_cycle` starts at learning_rate and rises to this multiple of it."""
    optim: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """Optimizer; `adamw` is torch's fused one, `adamw_8bit` is bitsandbytes' (CUDA)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; not applied to biases and norms."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient norm to clip to; 0 clips nothing."""
    seed: NonNegativeInt = 42
    """Fixes data order, initial weights and dropout."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass to save memory."""
    sync_each_micro_batch: bool | Auto = "auto"
    """Reduce gradients in every micro-batch, so that no rank keeps whole ones between them; once a step is faster.
    With fsdp2, whose choice it is."""
    drop_last: bool = False
    """Leave out the last, smaller batch of each epoch (steps = floor), or train on it too (steps = ceil)."""
    logging_steps: PositiveInt = 1
    """Print a step line every N optimizer steps; every step is recorded in metrics.jsonl."""

    @model_validator(mode="after")
    def _scaling_has_a_base(self) -> TrainSection:
        if self.lr_scaling != "none" and self.lr_scaling_base is None:
            raise ValueError(
                "`lr_scaling` needs `lr_scaling_base`, the global batch for which learning_rate was chosen"
            )
        return self


class EvalSection(Section):
    """Evaluation on held-out data while training."""

    every: Every = Field(default=Interval(value=1, unit="epoch"), json_schema_extra={"default": "1 epoch"})
    """`1 epoch`, `0.5 epochs` or `200 steps`."""
    batch_size: PositiveInt | Auto = "auto"
    """Examples in one evaluation pass on one GPU; 3 x micro-batch when auto, as no gradients are kept."""
    limit: PositiveInt | None = None
    """Evaluate on the first N held-out examples only."""


class CheckpointSection(Section):
    """When the run is saved and what is kept."""

    every: Every = Field(default=Interval(value=1, unit="epoch"), json_schema_extra={"default": "1 epoch"})
    """`1 epoch`, `0.5 epochs` or `200 steps`."""
    keep: PositiveInt = 3
    """Newest checkpoints to keep; the best one is kept besides."""


class ResourcesSection(Section):
    """What to run on; everything is found and chosen when left at auto."""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """Kind of device."""
    gpus: PositiveInt | list[StrictInt | str] | Auto = "auto"
    """How many GPUs, or which: indices, UUIDs or MIG ids."""
    ranks: PositiveInt | Auto = "auto"
    """Processes; one a GPU, and on the CPU as many as asked for (1 when auto)."""
    strategy: Literal["auto", "single", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "auto"
    """How the ranks share the work."""
    offload: Literal["none", "optimizer", "optimizer+parameters"] = "none"
    """What ZeRO keeps in host memory."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Arithmetic of the forward and backward pass; weights that are trained are kept in fp32."""
    balance: Literal["auto", "off"] = "auto"
    """Give GPUs of different speed parts of a step that take them as long as each other; `off` gives equal parts."""
    host_memory_free_gib: Annotated[float, Field(ge=0)] = 2.0
    """Host memory that stays free."""
    hang_timeout_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds that ranks may stay in one section of a step (data, forward, ...) before the run counts as hanging: it
    keeps all stacks, names the rank at fault, and restarts, or ends with exit status 76. Six times as long for the
    first step, a save and each pass of an evaluation, an hour for the start, and never less than three times what the
    section usually takes. 0 waits for ever."""


class AlertsSection(Section):
    """What is worth an alert while the run goes on, and whom it is told besides the log."""

    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments to run at each alert and at the run's end, without a shell; JSON on its standard input."""
    webhook_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable that holds a URL (https, or http on loopback) to post each alert and the end to as JSON."""
    gpu_memory_min_pct: Percent = 70.0
    """GPU memory in use below this is noted: there is room for a larger micro-batch."""
    gpu_memory_max_pct: Percent = 85.0
    """GPU memory in use above this is near to running out."""
    gpu_utilization_min_pct: Percent = 50.0
    """GPU utilisation below this for a minute: the GPU waits for something."""
    gpu_utilization_max_pct: Percent = 90.0
    """GPU utilisation above this is noted: the card is full, and more work makes steps longer."""
    gpu_temperature_max_c: PositiveFloat = 85.0
    """Warmest that a GPU should be, in degrees Celsius."""
    host_available_min_gib: PositiveFloat = 2.0
    """Host memory that should stay available."""
    disk_free_min_gib: PositiveFloat = 2.0
    """Room that the run folder's disk should have; the size of the newest checkpoint where that is more."""
    loss_rise_max_pct: PositiveFloat = 10.0
    """How far the median loss of 50 steps may rise, if its own scatter and 5 % of the first such median are less."""
    step_time_rise_max_pct: PositiveFloat = 30.0
    """How far the time of a step may rise above that of the attempt's first 50."""
    straggler_min_score: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """The fastest rank's compute time over a rank's own; below this it holds up the others."""
    data_wait_max_pct: Percent = 20.0
    """Share of a step that a rank may wait for data."""
    checkpoint_age_max_min: PositiveFloat = 60.0
    """Work that may be lost, in minutes since the last checkpoint."""


class Job(Section):
    """What to learn, from what, how; one YAML file or a preset, plus overrides."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the run: the folder `<output_dir>/<name>`."""
    description: str = ""
    """One line for people."""
    output_dir: str = "outputs"
    """Folder that holds the run folders."""
    script: Annotated[list[Argument], Field(min_length=1)] | None = None
    """Command of a training script of your own, one argument an element: `[python, train.py, --batch-size,
    "{micro_batch_size}"]`; in place of the built-in trainer."""
    launcher: Literal["auto", "python", "torchrun", "accelerate", "deepspeed"] = "auto"
    """What starts the processes of `script`; `auto` goes by what the script imports. `python` is one process."""
    model: Annotated[ModelSection, Field(validate_default=True)] = ModelSection()
    """Which model to train; a job with a `script` may leave it out."""
    task: str = "causal-lm"
    """`causal-lm`, `seq2seq`, or `module:Class` of your own."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a task of your own."""
    data: DataSection = DataSection()
    method: MethodSection = MethodSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resources: ResourcesSection = ResourcesSection()
    tracking: list[Tracker] = Field(default=["tensorboard"])
    """Where metrics go besides metrics.jsonl; wandb and mlflow must be installed."""
    alerts: AlertsSection = AlertsSection()
    claims: dict[str, str] = Field(default_factory=dict)
    """What a guide claims for this job; printed beside this tool's own figures, never used."""

    @field_validator("script")
    @classmethod
    def _script_starts_with_a_program(cls, script: list[str] | None) -> list[str] | None:
        if script is not None and (not script[0] or script[0].startswith("-")):
            raise ValueError("the first element is the program or the script itself: `[python, train.py]`")
        return script

    @field_validator("launcher")
    @classmethod
    def _launcher_is_for_a_script(cls, launcher: str, info: ValidationInfo) -> str:
        if launcher != "auto" and info.data.get("script", ()) is None:
            raise ValueError("`launcher` is for a `script` of your own, and there is none")
        return launcher

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, model: ModelSection, info: ValidationInfo) -> ModelSection:
        if not model.is_named and info.data.get("script", ()) is None:
            raise PydanticKnownError("missing")
        return model

    @field_validator("task")
    @classmethod
    def _task_is_known(cls, task: str) -> str:
        if task not in BUILT_IN_TASKS + PLANNED_TASKS and not _TASK.match(task):
            raise ValueError(f"task `{task}` is unknown: use {', '.join(BUILT_IN_TASKS)} or `module:Class`")
        return task
