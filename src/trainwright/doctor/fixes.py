"""The fix as a command for this run: with its own batch sizes, rate and paths where they are known."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from trainwright.doctor.causes import Cause
from trainwright.doctor.inputs import stored
from trainwright.doctor.scan import Scan
from trainwright.runs.folder import RunFolder

_FIELD: Final = re.compile(r"\{(\w+)\}")
_PACKAGES: Final = {
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn",
    "FlashAttention2": "flash-attn",
    "FlashAttention": "flash-attn",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_LOWER_RATE: Final = 3


def filled(template: str, fields: Mapping[str, str]) -> str | None:
    """Return a title or fix with its {fields} filled in; None where one of them is not known."""
    if any(name not in fields for name in _FIELD.findall(template)):
        return None
    return _FIELD.sub(lambda field: fields[field[1]], template)


def title_of(cause: Cause, fields: Mapping[str, str]) -> str:
    """Return the title of a cause, with a general word where a field is not known."""
    general = {"module": "it needs", "who": "a rank", "error": "an error", "status": "other than 0", "xid": "?"}
    return filled(cause.title, {**general, **fields}) or cause.title


def fixes_of(cause: Cause, fields: Mapping[str, str]) -> tuple[str, ...]:
    """Return the fixes of a cause in order, without those whose fields are not known."""
    known = {"who": "the missing rank", "output_dir": ".", "where": "the place in the traceback", **fields}
    if "module" in known:
        known["package"] = _PACKAGES.get(known["module"], known["module"])
    return tuple(text for fix in cause.fixes if (text := filled(fix, known)) is not None)


def run_fields(folder: RunFolder | None, scans: Iterable[Scan]) -> dict[str, str]:
    """Return the fields that depend on the run alone: its own commands, or those of the framework in its log."""
    if folder is not None and (plan := stored(folder.plan_json)):
        # What is damaged, or of another version, costs the commands and not the cause.
        with suppress(KeyError, TypeError, AttributeError, ValueError, ArithmeticError):
            return _of_run(folder, plan, stored(folder.resolved_json))
    facts: dict[str, str] = {}
    for scan in scans:
        facts = {**scan.facts, **facts}
    return _of_log(facts)


def _of_run(folder: RunFolder, plan: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, str]:
    layout, again = plan["layout"], shlex.join(["trainwright", "train", str(folder.resolved_json)])
    rate = float(plan.get("learning_rate") or job["train"]["learning_rate"])
    lower = f"{rate / _LOWER_RATE:.2g}"
    free_gib = job.get("resources", {}).get("host_memory_free_gib", 2)
    evaluation = max(1, layout["eval_batch_size"] // 2)
    return {
        "smaller_batch": _smaller(layout, job, again),
        "smaller_eval_batch": f"a smaller evaluation batch: {again} eval.batch_size={evaluation}",
        "larger_batch": f"a larger micro-batch: {again} train.micro_batch_size={2 * layout['micro_batch_size']}",
        "lower_rate": f"a lower learning rate, with warm-up: {again} --fresh train.learning_rate={lower} "
        "train.warmup_steps=0.1",
        "go_on": f"the same command goes on from the last checkpoint: {again}",
        "more_host_memory": f"free host memory, or ask for more (sbatch --mem, the container's limit); the plan leaves "
        f"{free_gib:g} GiB free: {again} train.micro_batch_size=1",
        "output_dir": shlex.quote(str(folder.path)),
    }


def _smaller(layout: Mapping[str, Any], job: Mapping[str, Any], again: str) -> str:
    micro, ranks, whole = layout["micro_batch_size"], layout["ranks"], layout["global_batch_size"]
    if micro == 1:
        more = "" if layout["gradient_checkpointing"] else " train.gradient_checkpointing=true"
        return f"the micro-batch is 1 already: {again}{more} method.type=qlora, or a shorter data.max_length"
    half = micro // 2
    accumulation = math.ceil(whole / (half * ranks))
    over = f" x {ranks}" if ranks > 1 else ""
    overrides = f"train.micro_batch_size={half}"
    if job["train"].get("gradient_accumulation_steps", "auto") != "auto":
        overrides += f" train.gradient_accumulation_steps={accumulation}"
    return f"micro-batch {half} x {accumulation}{over} keeps {whole}: {again} {overrides}"


def _of_log(facts: Mapping[str, str]) -> dict[str, str]:
    micro = _number(facts.get("micro_batch"))
    accumulation = _number(facts.get("accumulation")) or 1
    if micro and micro > 1:
        half = micro // 2
        smaller = (
            f"micro-batch {half} x {accumulation * micro // half} keeps {micro * accumulation} a GPU: "
            f"--per_device_train_batch_size {half} --gradient_accumulation_steps {accumulation * micro // half}"
        )
    elif micro:
        smaller = "the micro-batch is 1 already: --gradient_checkpointing True, a shorter --max_length, LoRA or QLoRA"
    else:
        smaller = (
            "halve the micro-batch and double the accumulation, which keeps the global batch: "
            "--per_device_train_batch_size N/2 --gradient_accumulation_steps 2M"
        )
    return {
        "smaller_batch": smaller,
        "smaller_eval_batch": "a smaller evaluation batch: --per_device_eval_batch_size 1 (or the val dataloader's)",
        "larger_batch": "a larger micro-batch, with as much less accumulation: --per_device_train_batch_size 2N",
        "lower_rate": "a learning rate of a third, with warm-up: --learning_rate LR/3 --warmup_ratio 0.1",
        "go_on": "go on from the last whole checkpoint: --resume_from_checkpoint PATH (trainwright: the same command)",
        "more_host_memory": "give the job more host memory: sbatch --mem=..., docker run --memory=...",
    }


def _number(text: str | None) -> int | None:
    return int(text.replace(",", "")) if text else None
