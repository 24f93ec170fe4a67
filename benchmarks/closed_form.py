"""The closed form of memory against the traced step: error by family, method and strategy, and the time it takes.

    python benchmarks/closed_form.py [--models qwen2.5,llama] [--small | --whole] [--json]

Models of the bundled catalogue are traced at two short depths that are continued to their own; `--whole` traces all
their layers, and `--small` models of five layers of every family instead, which gives reserved memory too: as the quick
form that ranks layouts has it, and as the replay of every piece has it, which a plan confirms its choice by. A part of
a model's combinations is drawn, the same one each time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from trainwright.anatomy import anatomy, read_config
from trainwright.anatomy.catalog import catalog
from trainwright.estimate.closed import memory, replayed
from trainwright.estimate.request import Request

DRAWN_OF_CATALOG, DRAWN_OF_SMALL = 2, 16
TOGETHER = 40
"""Requests traced in one process."""
_SMALL: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 5, "num_attention_heads": 8, "vocab_size": 8192}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = _SMALL | {"intermediate_size": 1376, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 512, "n_layer": 5, "n_head": 8, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED | {"sliding_window": 256},
    "qwen2": _GROUPED | {"tie_word_embeddings": True},
    "qwen3": _GROUPED | {"head_dim": 64},
    "gemma": _GROUPED | {"head_dim": 64, "num_key_value_heads": 1},
    "gemma2": _GROUPED | {"head_dim": 64, "sliding_window": 256},
    "gemma3_text": _GROUPED | {"head_dim": 64, "sliding_window": 256, "num_hidden_layers": 8},
    "phi3": _GROUPED | _TOKENS,
    "olmo2": _GROUPED | _TOKENS,
    "olmo3": _GROUPED | _TOKENS | {"sliding_window": 256, "num_hidden_layers": 8},
    "smollm3": _GROUPED | _TOKENS | {"num_hidden_layers": 8},
    "granite": _GROUPED | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "glm": _GROUPED | _TOKENS | {"head_dim": 64},
    "glm4": _GROUPED | _TOKENS | {"head_dim": 64},
    "ministral": _GROUPED | {"head_dim": 64, "sliding_window": 256},
    "ministral3": _GROUPED | _TOKENS | {"head_dim": 64},
    "seed_oss": _GROUPED | {"head_dim": 64},
    "hunyuan_v1_dense": _GROUPED | {"head_dim": 64},
    "exaone4": _GROUPED | {"sliding_window": 256, "num_hidden_layers": 8},
    "ernie4_5": _GROUPED | {"head_dim": 64},
    "phi": _SMALL | {"intermediate_size": 2048},
    "starcoder2": _GROUPED | _TOKENS,
    "gpt_neox": _SMALL | {"intermediate_size": 2048},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "opt": _SMALL | {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_layer": 5, "n_head": 8, "vocab_size": 8192},
    "mpt": {"d_model": 512, "n_layers": 5, "n_heads": 8, "vocab_size": 8192},
    "mixtral": _GROUPED | {"num_local_experts": 8},
    "qwen2_moe": _GROUPED
    | {
        "num_experts": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": _GROUPED | {"num_experts": 8, "moe_intermediate_size": 256, "head_dim": 64, "num_experts_per_tok": 2},
    "t5": {
        "d_model": 512,
        "d_ff": 1024,
        "num_layers": 5,
        "num_decoder_layers": 5,
        "num_heads": 8,
        "vocab_size": 8192,
        "decoder_start_token_id": 0,
    },
}


@dataclasses.dataclass(frozen=True)
class Compared:
    """One request both ways; errors in percent of the trace, None where it says nothing."""

    model: str
    family: str
    method: str
    strategy: str
    allocated_gib: float
    error_pct: float
    rounded_error_pct: float | None
    quick_reserved_error_pct: float | None
    reserved_error_pct: float | None


def main() -> int:
    """Print the errors by family, method and strategy, and microseconds a layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="parts of names, with commas between them")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true")
    which.add_argument("--whole", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.models.lower().split(",") if name]
    requests = [
        (name, request)
        for name, request in (small_requests() if arguments.small else catalog_requests())
        if not wanted or any(part in name.lower() for part in wanted)
    ]
    if arguments.whole:
        requests = [(name, {**request, "two_depths": False}) for name, request in requests]
    answers = trace_all([request for _, request in requests])
    compared, untraced = compare_all(requests, answers)
    tables = {
        "family": table(compared, lambda c: c.family),
        "method": table(compared, lambda c: c.method),
        "strategy": table(compared, lambda c: c.strategy),
    }
    reserved = {
        "quick": [c.quick_reserved_error_pct for c in compared if c.quick_reserved_error_pct is not None],
        "replayed": [c.reserved_error_pct for c in compared if c.reserved_error_pct is not None],
    }
    reserved_tables = {way: summary([abs(error) for error in errors]) for way, errors in reserved.items() if errors}
    speed = microseconds_a_layout()
    if arguments.json:
        rows = [dataclasses.asdict(c) for c in compared]
        json.dump(
            {"tables": tables, "reserved": reserved_tables, "untraced": untraced, "speed": speed, "rows": rows},
            sys.stdout,
            indent=1,
        )
        print()
        return 0
    for name, lines in tables.items():
        show(name, lines)
    for error in sorted(compared, key=lambda c: -abs(c.error_pct))[:10]:
        print(
            f"{error.error_pct:+7.2f} %  {error.model}  {error.method}  {error.strategy}  {error.allocated_gib:.2f} GiB"
        )
    for way, errors in reserved.items():
        if errors:
            found = reserved_tables[way]
            print(
                f"reserved, {way}: median {found['median']:.2f} %, 95th percentile {found['p95']:.2f} %, "
                f"from {min(errors):+.1f} to {max(errors):+.1f} %"
            )
    print(f"not traced: {untraced}")
    print("  ".join(f"{name}: {value:.0f}" for name, value in speed.items()))
    return 0


def catalog_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests for every model of the catalogue that has a text decoder or is a T5."""
    for name, entry in catalog().models.items():
        config = dict(entry.config)
        if config["model_type"] in ("bert", "vit", "gemma3"):
            continue
        drawn = random.Random(name).sample(list(_combinations(config["model_type"])), DRAWN_OF_CATALOG)
        for values in drawn:
            whole = config["model_type"] == "t5"
            yield name, {"config": config, **values, "two_depths": not whole}


def small_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests for a small model of every family."""
    for family, dimensions in SMALL.items():
        combinations = list(_combinations(family))
        for values in random.Random(family).sample(combinations, min(DRAWN_OF_SMALL, len(combinations))):
            yield family, {"config": {"model_type": family, **dimensions}, **values}


def _combinations(family: str) -> Iterator[dict[str, Any]]:
    methods = ({"type": "full"}, {"type": "lora", "r": 16}, {"type": "qlora", "r": 16})
    shapes = ((1, 512), (4, 1024), (1, 4096), (8, 2048))
    strategies = (("single", 1), ("fsdp2", 8))
    for method, checkpointing, batch, (samples, length), (strategy, ranks) in itertools.product(
        methods, ("none", "non_reentrant"), ("full", "padded"), shapes, strategies
    ):
        values = {
            "method": method,
            "gradient_checkpointing": checkpointing,
            "batch": batch,
            "micro_batch_size": samples,
            "sequence_length": length,
            "strategy": strategy,
            "world_size": ranks,
        }
        yield values | ({"auto_class": "AutoModelForSeq2SeqLM", "target_length": 256} if family == "t5" else {})


def trace_all(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trace the requests, many in one process."""
    answers: list[dict[str, Any]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for begin in range(0, len(requests), TOGETHER):
        print(f"traced {begin} of {len(requests)}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "requests.json"
            path.write_text(json.dumps(requests[begin : begin + TOGETHER]))
            command = [sys.executable, "-m", "trainwright.estimate.trace.answer", str(path)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answers += json.loads(done.stdout)
    return answers


def compare_all(
    requests: Sequence[tuple[str, dict[str, Any]]], answers: Sequence[dict[str, Any]]
) -> tuple[list[Compared], dict[str, int]]:
    """Return the errors, and how many requests could not be traced for which reason."""
    compared, untraced = [], defaultdict[str, int](int)
    for (name, data), answer in zip(requests, answers, strict=True):
        if "error" in answer:
            untraced[answer["error"][:80]] += 1
            continue
        built = anatomy(read_config(data["config"], from_scratch=True))
        request = Request.parse({**data, "two_depths": False})
        predicted = memory(built, request)
        peak = answer["peak"]
        rounding = peak["parts_bytes"].get("rounding", 0)
        requested, reserved = peak["allocated_bytes"] - rounding, peak["reserved_bytes"]
        own = predicted.allocated_bytes - predicted.parts_bytes.get("rounding", 0)
        compared.append(
            Compared(
                name,
                data["config"]["model_type"],
                data["method"]["type"],
                data["strategy"],
                requested / 2**30,
                _off(own, requested),
                _off(predicted.allocated_bytes, peak["allocated_bytes"]) if reserved else None,
                _off(predicted.reserved_bytes, reserved) if reserved else None,
                _off(replayed(built, request).reserved_bytes, reserved) if reserved else None,
            )
        )
    return compared, dict(untraced)


def table(compared: Sequence[Compared], key: Any) -> list[dict[str, Any]]:
    """Return number, median, 95th percentile and maximum of the absolute errors of each group and of all."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in compared:
        groups[key(one)].append(abs(one.error_pct))
        groups["all"].append(abs(one.error_pct))
    return [{"name": name, **summary(errors)} for name, errors in groups.items()]


def show(name: str, lines: Iterable[dict[str, Any]]) -> None:
    """Print one table."""
    print(f"{name:<16}{'n':>5}{'median':>9}{'p95':>9}{'max':>9}   error of allocated memory in %")
    for line in lines:
        print(f"{line['name']:<16}{line['n']:>5}{line['median']:>9.3f}{line['p95']:>9.3f}{line['max']:>9.3f}")
    print()


def microseconds_a_layout() -> dict[str, float]:
    """Time 10,000 layouts of one model, the requests built too, the first one alone, and its replay."""
    built = anatomy(read_config(catalog().models["Qwen/Qwen2.5-7B"].config))
    base = Request(config={"model_type": "qwen2"}, micro_batch_size=1, sequence_length=2048)
    began_s = time.perf_counter()
    memory(built, base)
    first_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    replayed(built, base)
    replay_s = time.perf_counter() - began_s
    strategies = [("ddp", "none"), ("fsdp2", "none")]
    strategies += [(f"zero{stage}", offload) for stage in (1, 2, 3) for offload in ("none", "optimizer")]
    layouts = itertools.islice(
        itertools.product(range(1, 65), strategies, (2, 4, 8, 16, 32), ("none", "non_reentrant"), (1, 2)), 10_000
    )
    began_s = time.perf_counter()
    count = 0
    for samples, (strategy, offload), ranks, checkpointing, steps in layouts:
        request = dataclasses.replace(
            base,
            micro_batch_size=samples,
            strategy=strategy,
            offload=offload,
            world_size=ranks,
            gradient_checkpointing=checkpointing,
            gradient_accumulation_steps=steps,
        )
        memory(built, request)
        count += 1
    each_s = (time.perf_counter() - began_s) / count
    return {
        "layouts": count,
        "first_us": 1e6 * first_s,
        "us_a_layout": 1e6 * each_s,
        "us_first_replay": 1e6 * replay_s,
    }


def summary(errors: Sequence[float]) -> dict[str, Any]:
    """Return number, median, 95th percentile and maximum."""
    p95 = quantiles(errors, n=20, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    return {"n": len(errors), "median": median(errors), "p95": p95, "max": max(errors)}


def _off(predicted: float, traced: float) -> float:
    return 100 * (predicted / traced - 1)


if __name__ == "__main__":
    sys.exit(main())
