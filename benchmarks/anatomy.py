"""How exact and how fast the anatomy is over the bundled catalogue; one JSON document on stdout.

python benchmarks/anatomy.py           # against the published numbers, and time
python benchmarks/anatomy.py --built   # also against what transformers builds on the meta device (minutes)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from trainwright.anatomy import anatomy, read_config
from trainwright.anatomy.adapters import Lora
from trainwright.anatomy.catalog import CatalogModel, catalog
from trainwright.anatomy.flops import ForwardInput, step_flops


def main(arguments: list[str]) -> None:
    """Measure and print."""
    begin = time.perf_counter()
    models = catalog().models
    report: dict[str, Any] = {"schema_version": 1, "catalogue_load_ms": _ms_since(begin)}
    report["parameters"] = _against_published(models)
    if "--built" in arguments:
        report["built"] = {name: _is_what_transformers_builds(entry) for name, entry in models.items()}
    described = [anatomy(read_config(entry.config)) for entry in models.values()]
    batch = ForwardInput(samples=4, length=2048, source_length=2048)
    report["ms"] = {
        "describe": _milliseconds([lambda e=entry: anatomy(read_config(e.config)) for entry in models.values()]),
        "count_parameters": _milliseconds([lambda a=one: a.parameter_count for one in described]),
        "flops_full": _milliseconds([lambda a=one: step_flops(a, batch, checkpointing=True) for one in described]),
        "flops_lora": _milliseconds([lambda a=one: step_flops(a, batch, lora=Lora(16)) for one in described]),
    }
    print(json.dumps(report, indent=2))


def _against_published(models: dict[str, CatalogModel]) -> dict[str, Any]:
    exact, rounded, off = [], [], {}
    for name, entry in models.items():
        count = anatomy(read_config(entry.config)).parameter_count
        if entry.parameters.agrees_with(count):
            (rounded if entry.parameters.places else exact).append(name)
        else:
            off[name] = f"{100 * (count / entry.parameters.value - 1):+.2f} %"
    return {"models": len(models), "exact": len(exact), "to_the_published_digits": rounded, "off": off}


def _is_what_transformers_builds(entry: CatalogModel) -> bool:
    import torch
    import transformers

    fields = {name: value for name, value in entry.config.items() if name != "model_type"}
    family = entry.config["model_type"]
    kinds = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(family, **fields)
        model = getattr(transformers, kinds.get(family, "AutoModelForCausalLM")).from_config(config)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return anatomy(read_config(entry.config, from_scratch=True)).parameters() == built


def _milliseconds(calls: list[Callable[[], Any]]) -> dict[str, float]:
    taken = []
    for call in calls:
        begin = time.perf_counter()
        call()
        taken.append(_ms_since(begin))
    return {"median": round(statistics.median(taken), 3), "max": round(max(taken), 3)}


def _ms_since(begin: float) -> float:
    return round(1000 * (time.perf_counter() - begin), 3)


if __name__ == "__main__":
    main(sys.argv[1:])
