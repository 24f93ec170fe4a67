"""Sources whose rows hold memory figures of training programs that the trace does not run, each with the reason."""

from __future__ import annotations

OWN_PROGRAMS = {
    "github.com/Lightning-AI/litgpt": (
        "own training program: litgpt of 2023 (commit 8641822, on no package index) has a model, a fused LoRA and a "
        "loss in chunks of its own, and the batches hold rows of several lengths"
    ),
    "github.com/AnswerDotAI/fsdp_qlora": (
        "incomplete: no LoRA rank, targets, optimizer or precision, and the program has a wrapping policy, LoRA layers "
        "and CPU offload of its own"
    ),
    "github.com/lambdal/deeplearning-benchmark": (
        "own training program: NVIDIA's BERT of 2020 with apex (O2), whose code is in no library of today"
    ),
    "github.com/InternLM/InternEvo": (
        "own training program (InternEvo, with tensor and pipeline parallelism), and the kind of memory is not named"
    ),
}


def why_not(source: str) -> str | None:
    """Return why rows of a source cannot be traced; None when it is none of these."""
    for prefix, reason in OWN_PROGRAMS.items():
        if source.startswith(prefix):
            return f"{prefix.removeprefix('github.com/')}: {reason}"
    return None
