"""The GPU catalogue: what each model can do, every figure with its source; read from catalog.json.

A bare number stands in the source that its entry names; another source is written beside it. Rates are dense (no
structured sparsity; data sheets often print the sparse rate, twice as high) and for tensor cores with fp32
accumulation, which is what training uses and which GeForce cards do at half the rate of fp16 accumulation. GB/s are
decimal; NVLink is the sum of all links and both directions. Makers print GB of memory and mean GiB. `unverified`:
derived (SMs x operations per clock x boost clock), or known from users and not from the maker. Apple publishes no
16-bit rate of its own.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from trainwright.errors import UserError
from trainwright.hardware.reading import GIB, MIB, NotAvailable, Reading

_VENDOR_WORDS: Final = re.compile(r"\b(nvidia|geforce|tesla|quadro|apple|rtx|graphics|gpu)\b")
_JOINED_VENDOR: Final = re.compile(r"\b(nvidia|geforce|tesla|quadro|rtx)(?=[a-z]?\d)")
_SIZE_OR_FORM: Final = re.compile(r"(sxm\d?|pcie|nvl)?(\d+gb)?(sxm\d?|pcie|nvl)?")
_SIZE_SUFFIX: Final = re.compile(r"^(?P<model>.+?)[-_ ]?(?P<gib>\d+)\s?gi?b$")
_NEAR_IN_MEMORY: Final = 0.15
"""A variant is told by its memory when the driver's figure is this near; drivers and ECC keep up to a tenth back."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Entry):
    """One number and where it stands; `unverified` when only derived, or told by users instead of the maker."""

    value: Annotated[float, Field(gt=0)]
    source: str
    unverified: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_bare_number(cls, given: Any, info: ValidationInfo) -> Any:
        """A bare number has the source of the entry that it stands in."""
        source = (info.context or {}).get("source")
        if isinstance(given, int | float) and source is not None:
            return {"value": given, "source": source}
        return {"source": source, **given} if isinstance(given, Mapping) and source is not None else given


class NvLinkFigure(_Entry):
    """NVLink of one GPU: its generation, links and the rate over all of them, both directions added."""

    generation: Annotated[int, Field(ge=1, le=6)]
    links: Annotated[int, Field(gt=0)]
    gb_s: Figure
    form: Literal["board", "bridge"]
    """Wired on the board, or by a bridge that is bought for a pair of cards and may not be there."""


class GpuSpec(_Entry):
    """One model. Rates are dense, without structured sparsity, and accumulate in fp32, as training does."""

    key: str
    name: str
    kind: Literal["cuda", "mps"] = "cuda"
    architecture: str
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...]
    """Names that NVML, or sysctl on a Mac, gives the model."""
    compute_capability: tuple[int, int] | None = None
    memory_gib: Figure | None = None
    """Nominal size; None where the memory is the host's (Apple)."""
    memory_options_gib: tuple[int, ...] = ()
    """Sizes that a host with this GPU is sold with (Apple)."""
    driver_total_mib: Figure | None = None
    """What NVML and nvidia-smi report as the total, with ECC as the card is delivered."""
    cuda_total_gib: Figure | None = None
    """What CUDA reports as the total and torch prints in out-of-memory errors: what a job can really have."""
    bf16_tflops: Figure | None = None
    fp16_tflops: Figure | None = None
    tf32_tflops: Figure | None = None
    fp32_tflops: Figure
    bandwidth_gb_s: Figure
    nvlink: NvLinkFigure | None = None
    pcie_generation: Annotated[int, Field(ge=3, le=6)] | None = None
    pcie_width: Annotated[int, Field(ge=4, le=16)] | None = None
    tdp_w: Figure | None = None
    sm_count: Annotated[int, Field(gt=0)] | None = None
    boost_mhz: Annotated[int, Field(gt=0)] | None = None

    @property
    def total_bytes(self) -> int | None:
        """What the driver reports as the total, the nominal size where that is not known."""
        if self.driver_total_mib is not None:
            return int(self.driver_total_mib.value) * MIB
        return None if self.memory_gib is None else int(self.memory_gib.value * GIB)


class GpuCatalog(_Entry):
    """All models by key, and what each source is."""

    sources: dict[str, str]
    gpus: dict[str, GpuSpec]

    @model_validator(mode="after")
    def _sources_are_known(self) -> GpuCatalog:
        for key, gpu in self.gpus.items():
            for name, figure in figures(gpu).items():
                if figure.source not in self.sources:
                    raise ValueError(f"{key}.{name}: source `{figure.source}` is not listed under `sources`")
        return self

    @model_validator(mode="after")
    def _spellings_are_unique(self) -> GpuCatalog:
        owner: dict[str, str] = {}
        for key, gpu in self.gpus.items():
            for spelling in {_squash(text) for text in (key, *gpu.aliases)}:
                if owner.setdefault(spelling, key) != key:
                    raise ValueError(f"`{spelling}` means both {owner[spelling]} and {key}")
        return self


def figures(gpu: GpuSpec) -> dict[str, Figure]:
    """Every sourced number of one model by field name."""
    by_field = {name: value for name in type(gpu).model_fields if isinstance(value := getattr(gpu, name), Figure)}
    if gpu.nvlink is not None:
        by_field["nvlink.gb_s"] = gpu.nvlink.gb_s
    return by_field


@cache
def catalog() -> GpuCatalog:
    """The bundled catalogue, validated once a process."""
    raw = json.loads((files("trainwright.hardware") / "catalog.json").read_text(encoding="utf-8"))
    gpus = {}
    for key, entry in raw["gpus"].items():
        source = entry.pop("source")
        gpus[key] = GpuSpec.model_validate({"key": key, **entry}, context={"source": source})
    return GpuCatalog(sources=raw["sources"], gpus=gpus)


def identify(driver_name: str, memory_total_bytes: Reading[int]) -> str | None:
    """The key of a model by the name that its driver gives it, and its memory where several share the name."""
    named = [gpu for gpu in catalog().gpus.values() if _squash(driver_name) in map(_squash, gpu.driver_names)]
    if isinstance(memory_total_bytes, NotAvailable):
        return named[0].key if len(named) == 1 else None
    near = [(off, gpu.key) for gpu in named if (off := _memory_off(gpu, memory_total_bytes)) <= _NEAR_IN_MEMORY]
    return min(near)[1] if near else None


def _memory_off(gpu: GpuSpec, memory_total_bytes: int) -> float:
    return 0.0 if gpu.total_bytes is None else abs(memory_total_bytes / gpu.total_bytes - 1)


def find(text: str) -> GpuSpec:
    """The model that a user names (`a100-80gb`, `RTX 3080 20GB`); raises UserError with the nearest names."""
    wanted = _squash(text)
    gpus = catalog().gpus.values()
    for gpu in gpus:
        if wanted in {_squash(spelling) for spelling in (gpu.key, *gpu.aliases)}:
            return gpu
    variants = [gpu.key for gpu in gpus if wanted and wanted in _squash(gpu.key)]
    if len(variants) == 1:
        return catalog().gpus[variants[0]]
    if variants:
        raise UserError(f"`{text}` comes in several sizes or forms", hints=[f"write one of: {', '.join(variants)}"])
    spellings = {_squash(spelling): gpu.key for gpu in gpus for spelling in (gpu.key, *gpu.aliases)}
    near = list(dict.fromkeys(spellings[close] for close in difflib.get_close_matches(wanted, spellings, n=5)))
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    raise UserError(f"no GPU `{text}` in the catalogue", hints=[*hints, f"known are: {', '.join(catalog().gpus)}"])


def variants_of(text: str) -> tuple[GpuSpec, ...]:
    """The models that a name can mean: the one with that key or alias, else all that are it with a size or form.

    `a100` means four, `a100_80gb` one, `10` none.
    """
    wanted = _squash(_JOINED_VENDOR.sub(r"\1 ", text.lower()))
    gpus = catalog().gpus.values()
    spelled = tuple(gpu for gpu in gpus if wanted in map(_squash, (gpu.key, *gpu.aliases)))
    if spelled or not wanted:
        return spelled
    return tuple(
        gpu
        for gpu in gpus
        if any(_is_longer(_squash(name), wanted) for name in (gpu.key, *gpu.aliases, *gpu.driver_names))
    )


def _is_longer(name: str, wanted: str) -> bool:
    return name.startswith(wanted) and _SIZE_OR_FORM.fullmatch(name[len(wanted) :]) is not None


def split_size(text: str) -> tuple[str, int] | None:
    """`m2-max-64gb` as (`m2-max`, 64): a model and a memory size in GiB; None when no size is named."""
    match = _SIZE_SUFFIX.match(text.strip().lower())
    return None if match is None else (match["model"], int(match["gib"]))


def _squash(text: str) -> str:
    words = _VENDOR_WORDS.sub(" ", re.sub(r"[-_/]", " ", text.lower()))
    return re.sub(r"[^a-z0-9]", "", words)
