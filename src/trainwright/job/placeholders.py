"""Placeholders in the command of a user's own script: `{micro_batch_size}`, and `{{` for a brace that is meant.

Each element of the command is one argument before and after it is filled, whatever the values hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

PLACEHOLDERS = {
    "name": "name of the run",
    "output_dir": "folder for what the script writes, its checkpoints among them; the same in every attempt",
    "resume_from": "newest checkpoint that the script left in output_dir; none in the first attempt",
    "model": "model.name",
    "data": "data.path",
    "eval_data": "data.eval_path",
    "max_length": "data.max_length",
    "ranks": "processes in all",
    "micro_batch_size": "samples in one forward pass on one GPU",
    "gradient_accumulation_steps": "forward passes in one optimizer step",
    "global_batch_size": "samples in one optimizer step, over all processes",
    "eval_batch_size": "samples in one evaluation pass on one GPU",
    "learning_rate": "peak learning rate, after any scaling",
    "num_train_epochs": "train.num_train_epochs",
    "max_steps": "train.max_steps",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
    "seed": "train.seed",
    "precision": "bf16, fp16 or fp32",
    "strategy": "single, ddp, fsdp2, zero1, zero2 or zero3",
    "gradient_checkpointing": "true or false",
    "accelerate_config": "path of the written file for `accelerate launch --config_file`",
    "deepspeed_config": "path of the written file for DeepSpeed; none unless the strategy is a ZeRO stage",
}
"""Every placeholder with what stands in its place."""

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def problem_of(element: str) -> str | None:
    """Return what is wrong with the placeholders of one element, None where they are all known."""
    for match in _PIECE.finditer(element):
        if match[0] in ("{", "}"):
            return f"a single `{match[0]}`: write `{match[0] * 2}` where a brace is meant"
        if match[1] is not None and match[1] not in PLACEHOLDERS:
            near = difflib.get_close_matches(match[1], PLACEHOLDERS, n=1, cutoff=0.5)
            meant = f"; did you mean `{{{near[0]}}}`?" if near else f"; there are {', '.join(PLACEHOLDERS)}"
            return f"unknown placeholder `{match[0]}`{meant} (`{{{{` is a brace that is meant)"
    return None


def names_in(command: Sequence[str]) -> frozenset[str]:
    """Return the placeholders that a command uses."""
    return frozenset(match[1] for element in command for match in _PIECE.finditer(element) if match[1])


def filled(command: Sequence[str], values: Mapping[str, str | None]) -> list[str]:
    """Return the command with every placeholder replaced; elements stay single arguments.

    An element whose value is None, such as `{resume_from}` in a first attempt, is left out, and with it an option
    (`--resume`) that stands just before it.
    """
    arguments: list[str] = []
    for place, element in enumerate(command):
        if any(values[name] is None for name in names_in([element])):
            if place and _is_bare_option(command[place - 1]):
                del arguments[-1:]
            continue
        arguments.append(_PIECE.sub(lambda match: _replaced(match, values), element))
    return arguments


def _is_bare_option(element: str) -> bool:
    return element.startswith("-") and "=" not in element and not names_in([element])


def _replaced(match: re.Match[str], values: Mapping[str, str | None]) -> str:
    if match[1] is None:
        return match[0][0]
    value = values[match[1]]
    assert value is not None
    return value


def untold(command: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield those of `names` that the command does not use."""
    used = names_in(command)
    return (name for name in names if name not in used)
