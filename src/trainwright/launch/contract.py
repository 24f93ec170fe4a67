"""What a resume promises: the fields a checkpoint was made under, against those it would be continued under."""

from __future__ import annotations

import enum
import importlib.metadata
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.job.schema import Job
from trainwright.plan.layout import Layout
from trainwright.runs.file_hashes import file_digests

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes")
TEMPLATE = "data.template"
SCHEDULE = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "min_lr_ratio",
    "one_cycle_div_factor",
    "num_train_epochs",
    "max_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "drop_last",
)
PEAK = "peak learning rate"
"""Follows from other keys, so that none can allow it alone."""


class Level(enum.Enum):
    """How much of the uninterrupted run a resumed one keeps, from all of it to nothing."""

    EXACT = "exact: the same weights as without the interruption"
    SAME_STEPS = "same samples and learning rate a step; sums may round differently"
    OTHER_FILES = "same samples and learning rate a step, computed with other files than before, which stand below"
    EVERY_SAMPLE = "every sample once an epoch, learning rate by samples seen; steps are cut differently"
    REFUSED = "refused"


@dataclass(frozen=True)
class FieldDifference:
    """One field that is not what the checkpoint was made under; `consent` is the key that `--allow` takes for it."""

    key: str
    before: Any
    now: Any
    consent: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.before)} -> {_short(self.now)}"


@dataclass(frozen=True)
class Verdict:
    """The level that can be promised, the fields that differ, and those that refuse it.

    `uncompared` are the keys of the job whose files are known on one side only.
    """

    level: Level
    differences: tuple[FieldDifference, ...]
    refused: tuple[FieldDifference, ...]
    uncompared: tuple[str, ...] = ()


def contract_of(
    job: Job, layout: Layout, learning_rate: float, prepared: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the fields that decide what a run computes, by what a change of them means for a resume.

    `learning_rate` is the peak, after any scaling; `prepared` is what prepared.json holds, whose files are hashed.

    Raises:
        UserError: one of the files cannot be read.
    """
    train = job.train
    model = job.model.model_dump(mode="json", exclude={"attn_implementation"})
    return {
        "geometry": {
            "ranks": layout.ranks,
            "device": layout.device,
            "strategy": layout.strategy,
            "precision": layout.precision,
            "offload": layout.offload,
            "micro_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "gradient_checkpointing": layout.gradient_checkpointing,
            **({"sync_each_micro_batch": True} if layout.sync_each_micro_batch else {}),
            **({"rank_samples": layout.rank_samples} if layout.rank_samples else {}),
            "attn_implementation": job.model.attn_implementation,
            # Before, a micro-batch had neighbours in the order of the data, and decoders a mask of its padding.
            "micro-batches": "by length",
            **{f"version of {name}": version for name in PACKAGES if (version := _version(name))},
        },
        "batch": {"train.global_batch_size": train.global_batch_size},
        "schedule": {f"train.{name}": getattr(train, name) for name in SCHEDULE} | {PEAK: learning_rate},
        "fixed": {
            **_by_key("model", model),
            "task": job.task,
            **_by_key("task_options", job.task_options),
            **_by_key("method", job.method.model_dump(mode="json", exclude={"merge"})),
            "train.optim": train.optim,
            "train.seed": train.seed,
            "data": prepared["data_fingerprint"],
        },
        "inputs": _inputs(prepared),
        # Refuses nothing by itself: the tokens decide. Where they differ, this says why.
        "template": {TEMPLATE: template["value"]} if (template := prepared.get("template")) else {},
    }


def compare(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str]) -> Verdict:
    """Return what continuing under `now` keeps of a run made under `before`.

    A change of the global batch, of the schedule or of what a file holds needs the user's word for it (`allowed` keys);
    one of the data, the model, the method or the optimizer is never taken.
    """
    before = {"inputs": {}, **before}
    now = {"inputs": {}, **now}
    differences = {
        group: _differences(before.get(group, {}), now[group], allowable=group in ("batch", "schedule"))
        for group in now
        if group != "inputs"
    }
    inputs, uncompared = _compared_inputs(before["inputs"], now["inputs"])
    schedule = _without_what_follows(differences["schedule"], differences["batch"])
    unconsented = [d for d in schedule + differences["batch"] + inputs if d.consent not in allowed]
    if any(difference.key == "data" for difference in differences["fixed"]):
        differences["fixed"] += differences.get("template", [])
    by_steps = now["schedule"]["train.max_steps"] is not None
    uncountable = [d for d in differences["batch"] if by_steps and d not in unconsented]
    refused = differences["fixed"] + unconsented + uncountable
    every = differences["fixed"] + differences["batch"] + schedule + inputs + differences["geometry"]
    worst_first = (
        (Level.REFUSED, refused),
        (Level.EVERY_SAMPLE, schedule + differences["batch"]),
        (Level.OTHER_FILES, inputs),
        (Level.SAME_STEPS, differences["geometry"]),
    )
    level = next((level for level, reasons in worst_first if reasons), Level.EXACT)
    return Verdict(level, tuple(every), tuple(refused), uncompared)


def _without_what_follows(schedule: list[FieldDifference], batch: Sequence[FieldDifference]) -> list[FieldDifference]:
    """Return the changes of the schedule; that of the peak, which follows from others, only where it is alone."""
    others = [difference for difference in schedule if difference.key != PEAK]
    return others if others or batch else schedule


def _inputs(prepared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the files behind each key of the job hold, and what the model takes from its tokenizer."""
    files: Mapping[str, Mapping[str, str]] = prepared.get("files", {})
    digests = file_digests(Path(path) for found in files.values() for path in found.values())
    inputs: dict[str, dict[str, Any]] = {
        key: {
            name: {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
            for name, path in found.items()
            for digest in [digests[Path(path)]]
        }
        for key, found in files.items()
    }
    return inputs | ({"model.tokenizer": dict(prepared["token_ids"])} if "token_ids" in prepared else {})


def _compared_inputs(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[FieldDifference], tuple[str, ...]]:
    """Return what differs in the files of each key, and the keys that are known on one side only."""
    both = [key for key in now if isinstance(before.get(key), Mapping)]
    differences = [
        FieldDifference(f"{found.key} ({key})", found.before, found.now, key)
        for key in both
        for found in _differences(before[key], now[key], allowable=True)
    ]
    return differences, tuple(sorted({*before, *now} - set(both)))


def _by_key(key: str, value: Any) -> dict[str, Any]:
    """Return what a section holds under the dotted keys that a user would change."""
    if not isinstance(value, Mapping):
        return {key: value}
    return {path: leaf for name, inner in value.items() for path, leaf in _by_key(f"{key}.{name}", inner).items()}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], *, allowable: bool) -> list[FieldDifference]:
    # Through JSON, as the stored side went: a tuple there is a list.
    now = json.loads(json.dumps(now))
    keys = [*now, *(key for key in before if key not in now)]
    return [
        FieldDifference(key, before.get(key), now.get(key), key if allowable and key != PEAK else None)
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and value.keys() == {"size_bytes", "sha256"}:
        return f"{value['size_bytes']:,} bytes, sha256 {str(value['sha256'])[:12]}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
