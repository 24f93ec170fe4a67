"""Models that people fine-tune today: what `plan` says of each, and whether memory is that of a real step.

    python benchmarks/models_of_today.py [--models olmo,gpt-oss] [--without plans,steps] [--no-trace] [--write]

`plans`: each model, LoRA and full, on 1 and 8 H100 of 80 GB, planned in a process of its own as the command does, and
its parameters counted by transformers on the meta device, held to the published number. `steps`: each architecture,
shrunken to four layers, traced for the CPU and run there on real tensors under the same tracker; where there is a
closed form it is held to the trace of the same step on a GPU. `--write` replaces results/models_of_today.json.

Dimensions and published numbers are in data/models_of_today.json and in the product's catalogue. Most of the former are
recalled and were not looked up, as each says: that they give the number to its printed digits is what speaks for them.
Exits with 1 where a plan's parameters are not those of the model, where a chosen layout cannot hold what it must, or
where memory is off by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trace_steps import answers_of

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "models_of_today.json"
METHODS, NODES = ("lora", "full"), ("h100:1", "h100:8")
HOST = "host=1000gib"
AT_ONCE = 2
PATIENCE_S = 3600
LIMIT_PCT = 1.0
CAUSAL = "AutoModelForCausalLM"
BUILT_BY = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}
BUILT_BY |= {"gemma3": "AutoModelForImageTextToText"}

LAYERS = 4
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model"), 256),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 128),
    **dict.fromkeys(
        ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "mamba_d_head", "d_kv", "kv_lora_rank", "q_lora_rank"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size", "mamba_d_state"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("num_heads", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("vocab_size",), 2048),
    **dict.fromkeys(("sliding_window", "max_source_positions", "mamba_d_ssm"), 64),
    "linear_num_value_heads": 4,
    "mamba_d_ssm": 512,
    "max_source_positions": 150,
    "image_size": 64,
}
"""Dimensions of a shrunken model by the names that configs have for them."""
INDICES = ("attn_layer_indices", "full_attn_idxs")


def main() -> int:
    """Plan and step, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="parts of names, with commas between them")
    parser.add_argument("--without", default="", help="plans, steps, or both with a comma")
    parser.add_argument("--no-trace", action="store_true", help="plan from what is known without a trace")
    parser.add_argument("--write", action="store_true", help=f"replace {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--real", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.real:
        json.dump(real_steps(arguments.real), sys.stdout)
        return 0
    if arguments.one:
        json.dump(plans_of(arguments.one, known()[arguments.one], trace=not arguments.no_trace), sys.stdout)
        return 0
    wanted = [part for part in arguments.models.lower().split(",") if part]
    models = {n: m for n, m in known().items() if not wanted or any(part in n.lower() for part in wanted)}
    without = arguments.without.split(",")
    found: dict[str, Any] = {name: version(name) for name in ("torch", "transformers", "peft")}
    if "plans" not in without:
        found["models"] = all_plans(models, "--no-trace" if arguments.no_trace else None)
        show_plans(found["models"])
    if "steps" not in without:
        found["steps"] = all_steps(models)
        show_steps(found["steps"])
    if arguments.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(wrong_plans(found.get("models", {}))) or any(map(is_off, found.get("steps", []))))


def known() -> dict[str, dict[str, Any]]:
    """Return every model by name: its config, the class that builds all of it, and its published parameters."""
    from trainwright.anatomy.catalog import find

    data = json.loads((HERE / "data" / "models_of_today.json").read_text())
    models: dict[str, dict[str, Any]] = dict(data["models"])
    for name in data["of_the_catalogue"]:
        entry = find(name)
        assert entry is not None, name
        built_by = BUILT_BY.get(entry.config["model_type"], CAUSAL)
        models[name] = {"config": entry.config, "built_by": built_by, "parameters": entry.parameters.model_dump()}
    return dict(sorted(models.items(), key=lambda item: item[0].lower()))


def all_plans(models: dict[str, Any], flag: str | None) -> dict[str, Any]:
    """Plan every model, some at once; a process each, so that none helps another and one that hangs is ended."""

    def asked(name: str) -> Any:
        command = [sys.executable, __file__, "--one", name, *([flag] if flag else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr}")
        answer = json.loads(done.stdout)
        outcomes = ", ".join(f"{p['method']} {p['gpus']}: {p['outcome']}" for p in answer["plans"])
        print(f"{name}: {answer['parameters']:,}; {outcomes}", file=sys.stderr, flush=True)
        return answer

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(models, pool.map(asked, models), strict=True))


def plans_of(name: str, model: dict[str, Any], *, trace: bool) -> dict[str, Any]:
    """Return a model's parameters, as published and as built, and what is planned for it."""
    from trainwright.anatomy.catalog import PublishedCount

    config, built_by = model["config"], model["built_by"]
    auto_class = "AutoModelForSeq2SeqLM" if built_by == "AutoModelForSeq2SeqLM" else CAUSAL
    whole = parameters_of(config, built_by)
    published = PublishedCount(**model["parameters"])
    return {
        "published": model["parameters"],
        "parameters": whole,
        "is_as_published": whole is not None and published.agrees_with(whole),
        "parameters_of_text_model": parameters_of(config, auto_class),
        "plans": [planned(config, auto_class, method, gpus, trace=trace) for method in METHODS for gpus in NODES],
    }


def parameters_of(config: dict[str, Any], auto_class: str) -> int | None:
    """Count the parameters on the meta device; None where this class builds no such model."""
    import torch
    import transformers

    from trainwright.estimate.trace.model import without_initial_values

    transformers.logging.set_verbosity_error()
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(values)
    with without_initial_values(), torch.device("meta"):
        try:
            model = getattr(transformers, auto_class).from_config(built)
        except ValueError:
            return None
    return sum(parameter.numel() for parameter in model.parameters())


def planned(config: dict[str, Any], auto_class: str, method: str, gpus: str, *, trace: bool) -> dict[str, Any]:
    """Plan one job as the command does."""
    from trainwright.errors import ExitCode, UserError
    from trainwright.job.loading import load_job
    from trainwright.launch.planning import PlanFlags, plan_job
    from trainwright.plan.job_model import NoEstimate, model_of, sized

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        job = Path(folder) / "job.yaml"
        task = "seq2seq" if auto_class == "AutoModelForSeq2SeqLM" else "causal-lm"
        job.write_text(
            f"name: of-today\ntask: {task}\nmodel: {{name: {folder}}}\nmethod: {{type: {method}}}\n"
            "data: {path: rows.jsonl, max_length: 2048}\ntrain: {global_batch_size: 64}\n"
        )
        began_s, loaded = time.perf_counter(), load_job(str(job), [])
        found = {"method": method, "gpus": gpus}
        model = model_of(loaded.job)
        described = not isinstance(model, NoEstimate)
        try:
            flags = PlanFlags(gpus=f"{gpus},{HOST}", samples=10_000, **({"trace": True} if trace else {}))
            _, plan, _ = plan_job(loaded, flags)
        except UserError as error:
            reason = error.render().replace(folder, "MODEL")
            return found | {"outcome": "refused", "exit_code": int(error.exit_code), "reason": reason} | _since(began_s)
        shapes = sized(loaded.job, model).shapes
    layout, estimate, least = plan.layout, plan.estimate, plan.least
    found |= {
        "exit_code": int(ExitCode.DONE if plan.is_known else ExitCode.MISSING),
        "layout": {
            key: getattr(layout, key)
            for key in (
                "strategy",
                "ranks",
                "micro_batch_size",
                "gradient_accumulation_steps",
                "gradient_checkpointing",
            )
        },
        "parameters": None if shapes is None else shapes.count,
        "least_gib": None if least is None else round(least.total_bytes / 2**30, 3),
        "least_fits": plan.is_known if least is None else least.why_not is None,
        "traces": list(plan.traces),
    }
    if estimate is None:
        return found | {"outcome": "by rule", "reason": plan.not_known} | _since(began_s)
    outcome = "closed" if described else "traced"
    return found | {"outcome": outcome, "peak_gib": round(estimate.peak_bytes / 2**30, 3)} | _since(began_s)


def _since(began_s: float) -> dict[str, float]:
    return {"seconds": round(time.perf_counter() - began_s, 1)}


def wrong_plans(models: dict[str, Any]) -> list[str]:
    """Return what is wrong: parameters that are not the model's, a layout that cannot hold what it must."""
    wrong = [f"{name}: not as published" for name, found in models.items() if not found["is_as_published"]]
    for name, found in models.items():
        for plan in found["plans"]:
            if plan["outcome"] == "refused":
                continue
            if plan["parameters"] != found["parameters_of_text_model"] or not plan["least_fits"]:
                wrong.append(f"{name}, {plan['method']} on {plan['gpus']}: {plan}")
    return wrong


def show_plans(models: dict[str, Any]) -> None:
    """Print a line for each model and the number of each outcome."""
    ways = [(method, gpus) for method in METHODS for gpus in NODES]
    print(f"{'model':48} {'parameters':>15} {'as said':>7}  " + "  ".join(f"{m + ' ' + g:>22}" for m, g in ways))
    for name, found in models.items():
        cells = "  ".join(f"{_cell(plan):>22}" for plan in found["plans"])
        print(f"{name:48} {found['parameters']:>15,} {found['is_as_published']!s:>7}  {cells}")
    print(dict(Counter(plan["outcome"] for found in models.values() for plan in found["plans"])))
    for line in wrong_plans(models):
        print(f"WRONG {line}")


def _cell(plan: dict[str, Any]) -> str:
    if plan["outcome"] == "refused":
        return f"refused ({plan['exit_code']})"
    size = plan.get("peak_gib", plan["least_gib"])
    return f"{plan['outcome']} {plan['layout']['strategy']} {size:.1f}"


def all_steps(models: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare memory of a small model of each architecture, traced and real, closed and traced."""
    asked = [step for step in map(_step, _one_each(models).items()) if step is not None]
    requests = [(name, method, request | {"method": {"type": method}}) for name, request in asked for method in METHODS]
    data = [request for _, _, request in requests]
    traced = answers_of(["-m", "trainwright.estimate.trace.answer"], data)
    real = answers_of([__file__, "--real"], data)
    on_gpu = answers_of(["-m", "trainwright.estimate.trace.answer"], [request | {"device": "cuda"} for request in data])
    rows = []
    for (name, method, request), answer, measured, cuda in zip(requests, traced, real, on_gpu, strict=True):
        row: dict[str, Any] = {"model": name, "family": request["config"]["model_type"], "method": method}
        if "error" in measured or "error" in answer:
            traced_to = "; ".join([answer.get("error", "traced"), *answer.get("problems", ())])
            rows.append(row | {"untraced": traced_to, "not_run": measured.get("error")})
            continue
        peak, expected = max(phase["requested_bytes"] for phase in answer["phases"]), max(measured.values())
        row |= {"real_bytes": expected, "traced_bytes": peak, "error_pct": 100 * (peak / expected - 1)}
        rows.append(row | _closed(request, cuda))
    return rows


def _one_each(models: dict[str, Any]) -> dict[str, Any]:
    of_family: dict[str, Any] = {}
    for name, model in models.items():
        of_family.setdefault(model["config"]["model_type"], (name, model))
    return dict(of_family.values())


def _step(item: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Return the request for a small model: of what is more than text, its decoder."""
    name, model = item
    config, built_by = shrunken(model["config"]), model["built_by"]
    if built_by == "AutoModelForImageTextToText":
        config, built_by = config["text_config"], CAUSAL
    if built_by == "AutoModel":
        return None
    request: dict[str, Any] = {"config": config, "auto_class": built_by, "micro_batch_size": 2, "sequence_length": 128}
    request["device"] = "cpu"
    if built_by not in (CAUSAL, "AutoModelForSeq2SeqLM"):
        request |= {"recipe": "transformers", "precision": "fp32"}
    return name, request


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model of the same architecture with four layers of small width."""
    import transformers

    values = {key: value for key, value in config.items() if key != "model_type"}
    whole = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(values).to_dict()
    return {"model_type": config["model_type"], **_smaller(whole)}


def _smaller(config: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    layers = config.get("num_hidden_layers")
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = _smaller(value)
        elif key in INDICES:
            small[key] = [1, 3]
        elif key.endswith("_token_id") and value is not None:
            small[key] = 1
        elif isinstance(value, list) and len(value) == layers:
            kinds = list(dict.fromkeys(value))
            small[key] = [kinds[index % len(kinds)] for index in range(LAYERS)]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            small[key] = SMALL.get(key, value)
        elif key not in ("architectures", "transformers_version", "dtype", "_name_or_path"):
            small[key] = value
    return small


def real_steps(path: Path) -> list[dict[str, Any]]:
    """Run steps on real tensors, one after the other; of a model that refuses, say how."""
    sys.path.insert(0, str(ROOT / "tests" / "estimate"))
    from real_steps import peaks_of

    from trainwright.estimate.trace.run import prepare

    prepare(with_adapters=True)
    found: list[dict[str, Any]] = []
    for request in json.loads(path.read_text()):
        print(
            f"really run: {request['config']['model_type']}, {request['method']['type']}", file=sys.stderr, flush=True
        )
        try:
            found.append(peaks_of(request))
        except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
            found.append({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    return found


def _closed(request: dict[str, Any], traced: dict[str, Any]) -> dict[str, Any]:
    """Return how far the closed form is from the trace for a GPU, nothing for a family that has none."""
    from trainwright.anatomy import anatomy, read_config
    from trainwright.errors import UserError
    from trainwright.estimate.closed import memory
    from trainwright.estimate.request import Request

    try:
        peak = memory(anatomy(read_config(request["config"])), Request.parse(request | {"device": "cuda"}))
    except UserError:
        return {}
    return {"closed_error_pct": 100 * (peak.allocated_bytes / traced["peak"]["allocated_bytes"] - 1)}


def is_off(row: dict[str, Any]) -> bool:
    """Whether memory is wrong, or a model that runs cannot be traced."""
    if "untraced" in row:
        return row["not_run"] is None
    return max(abs(row["error_pct"]), abs(row.get("closed_error_pct", 0.0))) > LIMIT_PCT


def show_steps(rows: list[dict[str, Any]]) -> None:
    """Print a line for each step."""
    print(f"{'model':48} {'method':>6} {'real MiB':>10} {'traced':>10} {'closed':>10}")
    for row in rows:
        if "untraced" in row:
            print(f"{row['model']:48} {row['method']:>6} {row['untraced']} | {row['not_run'] or 'runs'}")
            continue
        closed = f"{row['closed_error_pct']:+9.4f}%" if "closed_error_pct" in row else "none"
        real_mib = row["real_bytes"] / 2**20
        print(f"{row['model']:48} {row['method']:>6} {real_mib:10.3f} {row['error_pct']:+9.4f}% {closed:>10}")
    print(f"{sum(map(is_off, rows))} of {len(rows)} off by more than {LIMIT_PCT:g} %")


if __name__ == "__main__":
    sys.exit(main())
