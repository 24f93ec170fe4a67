"""What is asked: one rank's training step, by a model's config, a method and a layout.

The closed form and the traced step answer the same Request, so that they can be compared. The trace also runs in other
environments: this file imports nothing but errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from trainwright.errors import UserError

Precision = Literal["bf16", "fp16", "fp32"]
FusedPart = Literal["norm", "rotary", "mlp", "loss", "output_loss", "lora"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the model is trained; as in a job, with what only other trainers do after it."""

    type: Literal["full", "lora", "qlora"] = "full"
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    adapter_dtype: Literal["fp32", "base"] = "fp32"
    """peft keeps adapters of a half-precision model in fp32 unless told not to (`autocast_adapter_dtype`)."""
    quant_storage: Literal["auto", "uint8", "bf16", "fp16", "fp32"] = "auto"
    """What packed 4-bit weights are stored as; auto: the workers take the compute dtype, as FSDP shards by dtype,
    and bitsandbytes by itself takes uint8."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of parameter names that stay as they are; with `full` only."""
    upcast_frozen: Literal["none", "peft", "trl"] = "none"
    """Frozen half-precision weights that are not packed become fp32 (peft's `prepare_model_for_kbit_training`); in trl
    embeddings and output layer become bf16 again (its `peft_module_casting_to_bf16`)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training step; sequence lengths in tokens, batch sizes in samples."""

    config: dict[str, Any]
    """A transformers config, as in config.json; needs `model_type`."""
    auto_class: str = "AutoModelForCausalLM"
    recipe: Literal["trainwright", "transformers"] = "trainwright"
    """Whose step: that of this project's workers, or that of transformers' Trainer."""
    method: Method = field(default_factory=Method)
    precision: Precision = "bf16"
    """Arithmetic of the forward pass (autocast)."""
    weights: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of the base model; auto is the workers' rule: fp32 where it is trained, else that of `precision`."""
    autocast: bool = True
    """False: compute in the dtype of the weights, as the Trainer does without `bf16: true`."""
    optimizer: Literal["adamw", "adamw_foreach", "adamw_loop", "adamw_8bit", "adafactor"] = "adamw"
    """`adamw` is torch's fused one."""
    max_grad_norm: float = 1.0
    micro_batch_size: int
    sequence_length: int
    target_length: int | None = None
    """Of the responses of an encoder-decoder; None: as long as the prompts."""
    batch: Literal["full", "padded", "packed"] = "padded"
    """Rows of one length without padding; rows of several lengths; documents packed behind each other."""
    padding_mask: bool = True
    """Rows come with an attention mask, as most trainers give one; False: without, as the workers leave it out where
    causal attention makes it void (`job.padding`)."""
    learned_share: float = 1.0
    """Share of the positions that count in the loss."""
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: Literal["none", "non_reentrant", "reentrant"] = "none"
    attention: Literal["auto", "flash", "efficient", "cudnn", "math", "eager", "flash_attention_2"] = "auto"
    """Kernel of scaled_dot_product_attention, or another implementation in transformers; auto: as torch chooses."""
    shifted_logits_copied: bool = False
    """The loss cuts off the last position of the logits by a copy in fp32, as in transformers before 4.49."""
    fp32_logits: bool = False
    """The output layer's result is kept in fp32 alone, as in transformers before 4.46."""
    repeated_heads: bool = False
    """Grouped heads are repeated before `flash_attention_2`, as Mistral's and Mixtral's before transformers 4.48."""
    full_slices: bool = False
    """Indexing by a slice of all there is has a backward pass of its own, as in torch 2.4; 2.11 skips it."""
    separate_experts: bool = False
    """Experts are linear layers of their own, as before transformers 5 and in GPTQ models; transformers 5 stacks them,
    and what is stacked is not packed into 4 bits."""
    checkpoint_around_unit: bool = False
    """Under FSDP1 checkpoints are around the units of layers, as in transformers before 4.53, and not inside of them;
    the gradients of all layers' outputs then live as long as the backward pass."""
    tf32: bool = False
    """Products of fp32 tensors in TF32 where the GPU has it (`torch.set_float32_matmul_precision("high")`)."""
    fused_kernels: list[FusedPart] = field(default_factory=list)
    """Parts of the model computed by fused kernels, those of fms-acceleration (unsloth's) and of Liger: `loss` reads
    the logits, `output_loss` (Liger) never makes all of them, `mlp` (Liger) is the gate of an MLP, and `lora` (unsloth)
    needs packed attention weights with adapters on q, k, v and o."""
    strategy: Literal["single", "ddp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3"] = "single"
    offload: Literal["none", "optimizer", "optimizer+parameters"] = "none"
    """What ZeRO keeps in host memory."""
    world_size: int = 1
    reshard_after_forward: bool = True
    sync_each_micro_batch: bool = False
    """FSDP2 reduces gradients in every micro-batch, and keeps none of them whole until the last one."""
    evaluation_batch_size: int | None = None
    """Also trace an evaluation pass of this many samples after the steps."""
    device: Literal["cuda", "cpu"] = "cuda"
    compute_capability: tuple[int, int] = (8, 0)
    capacity_bytes: int | None = None
    """What the process may reserve on the GPU."""
    expandable_segments: bool = False
    two_depths: bool = False
    """Trace two short models of the same layers and continue the line; gives no reserved memory."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError("this training step cannot be estimated", problems=problems)

    @staticmethod
    def parse(data: Mapping[str, Any]) -> Request:
        """Read a request from JSON data.

        Raises:
            UserError: unknown keys, missing keys, or values out of range; all of them at once.
        """
        problems = _unknown(data, Request, "")
        method = data.get("method", {})
        if not isinstance(method, Mapping):
            problems.append("method: must be an object")
            method = {}
        problems += _unknown(method, Method, "method.")
        missing = [key for key in ("config", "micro_batch_size", "sequence_length") if key not in data]
        problems += [f"{key}: is missing" for key in missing]
        if problems:
            raise UserError("this training step cannot be estimated", problems=problems)
        values = dict(data) | {"method": Method(**method)}
        if "compute_capability" in values:
            values["compute_capability"] = tuple(values["compute_capability"])
        return Request(**values)

    @property
    def seen_batch(self) -> Literal["full", "padded", "packed"]:
        """The batch as the model sees it, which takes padding for tokens where no mask says otherwise."""
        return "full" if self.batch == "padded" and not self.padding_mask else self.batch

    @property
    def has_mask(self) -> bool:
        """Whether an attention mask is among the inputs; transformers' collators give none to rows without padding."""
        return self.padding_mask and self.batch != "packed" and (self.batch == "padded" or self.recipe == "trainwright")

    @property
    def base_dtype(self) -> str:
        """Dtype of the base model."""
        if self.weights != "auto":
            return self.weights
        return "fp32" if self.method.type == "full" else self.precision

    @property
    def quant_storage(self) -> str:
        """Dtype that packed weights are stored as."""
        if self.method.quant_storage != "auto":
            return self.method.quant_storage
        return self.precision if self.recipe == "trainwright" else "uint8"

    def _problems(self) -> list[str]:
        problems = [
            *_outside(self, Request, ""),
            *_outside(self.method, Method, "method."),
        ]
        if "model_type" not in self.config:
            problems.append("config.model_type: is missing")
        for name in ("micro_batch_size", "sequence_length", "gradient_accumulation_steps", "world_size"):
            if getattr(self, name) < 1:
                problems.append(f"{name}: must be at least 1, is {getattr(self, name)}")
        if not 0 < self.learned_share <= 1:
            problems.append(f"learned_share: must be above 0 and at most 1, is {self.learned_share}")
        return problems + self._contradictions()

    def _contradictions(self) -> list[str]:
        """Return which values, each of them possible, do not go together."""
        problems = []
        if self.strategy == "single" and self.world_size != 1:
            problems.append(f"world_size: strategy single runs 1 rank, not {self.world_size}")
        if self.sync_each_micro_batch and self.strategy != "fsdp2":
            problems.append("sync_each_micro_batch: is for the strategy fsdp2")
        if self.two_depths and self.strategy not in ("single", "fsdp2"):
            problems.append("two_depths: is for the strategies single and fsdp2")
        if self.repeated_heads and self.attention != "flash_attention_2":
            problems.append("repeated_heads: is for the attention flash_attention_2")
        problems += self._unknown_kernels()
        if self.recipe == "trainwright" and {"loss", "output_loss"} & set(self.fused_kernels):
            problems.append("fused_kernels: the workers have a loss of their own, the model's is recipe transformers")
        if self.device == "cpu" and self.method.type == "qlora":
            problems.append("method.type: qlora is traced on cuda only")
        return problems

    def _unknown_kernels(self) -> list[str]:
        parts = get_args(FusedPart)
        unknown = [part for part in self.fused_kernels if part not in parts]
        return [f"fused_kernels: has {part!r}; there are {', '.join(parts)}" for part in unknown]


def _unknown(data: Mapping[str, Any], kind: type, prefix: str) -> list[str]:
    known = {f.name for f in fields(kind)}
    return [f"{prefix}{key}: is not known; there are {', '.join(sorted(known))}" for key in data if key not in known]


def _outside(instance: object, kind: type, prefix: str) -> list[str]:
    return [
        f"{prefix}{name}: must be one of {', '.join(choices)}, is {value!r}"
        for name, choices in _choices(kind)
        if (value := getattr(instance, name)) not in choices
    ]


@cache
def _choices(kind: type) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Fields that take one of a few words; thousands of layouts are asked about, and hints are slow to evaluate."""
    found = ((name, get_args(hint)) for name, hint in get_type_hints(kind).items())
    return tuple((name, words) for name, words in found if words and all(isinstance(word, str) for word in words))
