"""Checkpoints of the live run: every rank writes its part, rank 0 commits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trainwright.job.batch_schedule import Position
from trainwright.runs.checkpoints import FileDigest, commit, open_staging, read_manifest, retain, seal_file
from trainwright.runs.folder import RunFolder
from trainwright.runs.storage import retry_storage
from trainwright.train.cutting.split import Split
from trainwright.train.ranks import Ranks
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.tensors import ShardWriter, TensorReader

ADAPTER_STEM, MODEL_STEM, OPTIMIZER_STEM = "adapter_model", "model", "optimizer"


@dataclass(frozen=True)
class Best:
    """The best evaluation so far; a smaller loss is better."""

    step: int
    eval_loss: float


def weights_stem(strategy: Strategy) -> str:
    """Return the name of the weight files: Hugging Face's for a model, peft's for adapters."""
    return ADAPTER_STEM if hasattr(strategy.module, "peft_config") else MODEL_STEM


def save_checkpoint(
    folder: RunFolder,
    strategy: Strategy,
    ranks: Ranks,
    *,
    attempt: int,
    position: Position,
    best: Best | None,
    eval_due: bool,
    split: Split,
    contract: dict[str, Any],
    keep: int,
) -> Path:
    """Save the run as `checkpoint-<step>` and return the path; every rank calls it at the same step boundary.

    The checkpoint exists once rank 0 has renamed it into place, with the sha256 of every file in its manifest.

    Raises:
        UserError: the storage fails for good (exit 73), or another attempt took the run over.
    """
    step = position.step
    staging = folder.staging_dir(step, attempt)
    if ranks.is_first:
        retry_storage(lambda: open_staging(folder, step, attempt), f"saving checkpoint-{step}", path=folder.path)
    ranks.barrier()
    digests: dict[str, FileDigest] = {}
    stem = weights_stem(strategy)
    for name, tensors, shards in (
        (stem, strategy.gather_weights(), 1 if stem == ADAPTER_STEM else ranks.world_size),
        (OPTIMIZER_STEM, strategy.gather_optimizer(), ranks.world_size),
    ):
        writer = ShardWriter(name, rank=ranks.rank, shards=shards)
        writer.collect(tensors)
        digests |= _write(writer, staging, step, is_first=ranks.is_first)
    state = {
        "position": dataclasses.asdict(position),
        "best": dataclasses.asdict(best) if best else None,
        "eval_due": eval_due,
        "rank_samples": split.weights,
        "scalars": strategy.scalars(),
    }
    if ranks.is_first:
        digests |= retry_storage(
            lambda: _write_companions(staging, strategy, state), f"saving checkpoint-{step}", path=staging
        )
    everyone = ranks.gather({name: dataclasses.asdict(digest) for name, digest in digests.items()})
    if ranks.is_first:
        together = {name: FileDigest(**digest) for part in everyone for name, digest in part.items()}
        retry_storage(
            lambda: commit(folder, step, attempt, together, contract=contract, state=state),
            f"saving checkpoint-{step}",
            path=folder.path,
        )
        retry_storage(
            lambda: retain(folder, keep, best.step if best else None), "deleting old checkpoints", path=folder.path
        )
    ranks.barrier()
    return folder.checkpoint_dir(step)


@dataclass(frozen=True)
class Restored:
    """Where a checkpoint's run stood: `rank_samples` of a global batch were each rank's share of it."""

    position: Position = field(default_factory=Position)
    best: Best | None = None
    eval_due: bool = False
    rank_samples: tuple[int, ...] = ()


def load_checkpoint(path: Path, strategy: Strategy) -> Restored:
    """Bring the strategy to a verified checkpoint, and return where its run stood."""
    manifest = read_manifest(path)
    strategy.load_weights(TensorReader(path, weights_stem(strategy), manifest.files))
    strategy.load_optimizer(TensorReader(path, OPTIMIZER_STEM, manifest.files))
    state = manifest.state
    strategy.load_scalars(state["scalars"])
    best = Best(**state["best"]) if state["best"] else None
    rank_samples = tuple(state.get("rank_samples", ()))  # a run of an earlier version has none
    return Restored(Position(**state["position"]), best, bool(state["eval_due"]), rank_samples)


def _write(writer: ShardWriter, staging: Path, step: int, *, is_first: bool) -> dict[str, FileDigest]:
    def write_and_seal() -> dict[str, FileDigest]:
        paths = [writer.write(staging), writer.write_index(staging) if is_first else None]
        return {path.name: seal_file(path) for path in paths if path is not None}

    def make_room() -> None:
        # What was half written would take the room that the error report needs on a full disk.
        (staging / writer.file_name).unlink(missing_ok=True)

    return retry_storage(
        write_and_seal,
        f"saving checkpoint-{step}",
        path=staging,
        needed_bytes=writer.own_bytes,
        clean_up=make_room,
        also=(RuntimeError, SafetensorError),
    )


def _write_companions(staging: Path, strategy: Strategy, state: dict[str, Any]) -> dict[str, FileDigest]:
    """Write what transformers and peft look for beside the weights, and the Trainer's state file."""
    module: Any = strategy.module
    if hasattr(module, "peft_config"):
        module.peft_config["default"].save_pretrained(staging)
    else:
        module.config.save_pretrained(staging)
    position, best = state["position"], state["best"]
    trainer_state = {
        "global_step": position["step"],
        "epoch": position["epoch"],
        "best_metric": best and best["eval_loss"],
        "best_global_step": best and best["step"],
        "samples_seen": position["samples_seen"],
    }
    (staging / "trainer_state.json").write_text(json.dumps(trainer_state, indent=1))
    known = ("config.json", "adapter_config.json", "generation_config.json", "trainer_state.json")
    return {name: seal_file(staging / name) for name in known if (staging / name).exists()}
