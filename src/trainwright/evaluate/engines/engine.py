"""What an engine is: a loaded model that continues any number of prompts.

engine = open_engine(EngineSettings(model="Qwen/Qwen2.5-1.5B-Instruct", devices=(0,)))
answers = engine.generate(prompts, max_new_tokens=64)       in the order of the prompts
engine.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias

EngineName: TypeAlias = Literal["auto", "transformers", "vllm"]
Placement: TypeAlias = tuple[int, ...] | Literal["cpu", "mps"]
"""CUDA ordinals as the process sees them, one for the whole model or several for its layers; or another device."""
Dtype: TypeAlias = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Generated:
    """What the model wrote after one prompt, and how sure it was."""

    text: str
    """The new tokens alone, without special tokens save those around thinking."""
    new_tokens: int
    prompt_tokens: int
    confidence: float | None
    """The probability that the model gave its first token; None where the engine does not tell."""


class Engine(Protocol):
    """A model, loaded where its settings say."""

    name: str
    """Of the engine: transformers, vllm."""

    @property
    def notes(self) -> list[str]:
        """What was chosen so far, each with its reason, a line each; it grows as batches are halved or prompts cut."""
        ...

    def generate(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[Generated]:
        """Return the most probable continuation of each prompt, in their order; batches are the engine's own matter.

        Raises:
            UserError: answers are as long as all that the model reads, or not even one prompt fits into memory.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the engine answers no more."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Which model answers, where, and how; plain data, which goes to a worker as JSON."""

    model: str
    """A folder, or a name of the Hugging Face hub."""
    devices: Placement = "cpu"
    engine: EngineName = "auto"
    dtype: Dtype = "auto"
    """auto: bf16 or fp16 as the GPU computes, fp32 on a processor."""
    batch_size: int | Literal["auto"] = "auto"
    """Prompts at a time; auto: as many as the memory that is free holds."""
    chat_template: bool | Literal["auto"] = "auto"
    """auto: where the tokenizer has one."""
    processes: int = 1
    """Engines that share the memory of these devices, as replicas on one processor do."""
    seed: int = 42
    revision: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> EngineSettings:
        """Return the settings that `to_json` wrote."""
        devices = content["devices"]
        return cls(**{**content, "devices": tuple(devices) if isinstance(devices, list) else devices})
