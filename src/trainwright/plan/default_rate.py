"""The learning rate that a job gets where it names none."""

from __future__ import annotations

from trainwright.hardware.choice import Choice
from trainwright.job.schema import Job

ADAPTERS, WHOLE, FROM_SCRATCH = 2e-4, 2e-5, 3e-4


def default_rate(job: Job) -> Choice[float]:
    """Return the usual peak learning rate of the job's method, with who used it.

    Adapters learn at about ten times the rate of the weights themselves: Dettmers et al., "QLoRA", arXiv 2305.14314,
    table 9, take 2e-4 up to 13B parameters; Stanford's Alpaca trained all of LLaMA-7B at 2e-5; Touvron et al.,
    "LLaMA", arXiv 2302.13971, table 2, made 7B and 13B from nothing at 3e-4.
    """
    if job.method.type != "full":
        return Choice(ADAPTERS, f"usual for {job.method.type}: QLoRA's authors take it up to 13B parameters")
    if job.model.from_scratch is not None:
        return Choice(FROM_SCRATCH, "usual for a model from scratch: LLaMA's authors take it for 7B parameters")
    return Choice(WHOLE, "usual for training all weights: Stanford's Alpaca takes it for 7B parameters")
