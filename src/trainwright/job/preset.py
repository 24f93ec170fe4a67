"""The presets: job files shipped with the package, and the machine and data that their guides' numbers belong to."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources

from trainwright.errors import UserError
from trainwright.job.schedule import effective_batch, steps_per_epoch
from trainwright.job.schema import Job

PREFIX = "preset:"


@dataclass(frozen=True)
class Guide:
    """The GPUs on which a guide runs its configuration, and the samples of its training data where it says so."""

    gpus: int
    samples: int | None


GUIDES = {
    "paper_r64": Guide(gpus=1, samples=2500),
    "pretrained_r320": Guide(gpus=1, samples=2500),
    "chatlm-small": Guide(gpus=2, samples=5000),
    "chatlm-fast-8": Guide(gpus=2, samples=5000),
    "chatlm-fast-12": Guide(gpus=2, samples=5000),
    "chatlm-fast-16": Guide(gpus=2, samples=5000),
    "chatlm-fast-20": Guide(gpus=2, samples=5000),
    "chatlm-fast-24": Guide(gpus=2, samples=5000),
    "multi-gpu-base": Guide(gpus=2, samples=29500),
    "multi-gpu-debug": Guide(gpus=1, samples=29500),
    "framer-lora-2gpu": Guide(gpus=2, samples=None),
    "framer-lora-3gpu": Guide(gpus=3, samples=None),
    "framer-lora-4gpu": Guide(gpus=4, samples=None),
    "framer-lora-flexible": Guide(gpus=4, samples=None),
}
"""In the order in which they are listed; every preset file has its line here."""


@dataclass(frozen=True)
class Arithmetic:
    """What a preset comes to on its guide's machine and data."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    gpus: int
    samples: int | None
    steps_per_epoch: int | None

    @property
    def effective_batch(self) -> int:
        """Examples in one optimizer step."""
        return effective_batch(self.micro_batch_size, self.gradient_accumulation_steps, self.gpus)


def preset_text(name: str) -> str:
    """Return the job file of a preset, as it is; raises UserError with the nearest name for an unknown one."""
    if name not in GUIDES:
        near = difflib.get_close_matches(name, GUIDES, n=1, cutoff=0.5)
        hints = [f"did you mean `{near[0]}`?"] if near else []
        raise UserError(f"there is no preset `{name}`", hints=[*hints, f"the presets are {', '.join(GUIDES)}"])
    file = resources.files("trainwright.job").joinpath("presets", f"{name}.yaml")
    return file.read_text(encoding="utf-8")


def arithmetic(name: str, job: Job) -> Arithmetic:
    """Return the batch and the steps of a preset on the machine and data of its guide."""
    guide, train = GUIDES[name], job.train
    assert isinstance(train.micro_batch_size, int), "a guide names its batch for one GPU"
    accumulation = train.gradient_accumulation_steps
    if accumulation == "auto":
        accumulation = train.global_batch_size // (train.micro_batch_size * guide.gpus)
    steps = None
    if guide.samples is not None:
        steps = steps_per_epoch(guide.samples, train.global_batch_size, train.drop_last)
    return Arithmetic(train.micro_batch_size, accumulation, guide.gpus, guide.samples, steps)
