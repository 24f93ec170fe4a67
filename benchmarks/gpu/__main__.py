"""Memory and time of training steps on the GPU at hand, beside what was predicted for them before.

    python benchmarks/gpu                      predict, if that was not done before; then measure and compare
    python benchmarks/gpu --predict            make the predictions only; needs no GPU
    python benchmarks/gpu --measure            measure only
    python benchmarks/gpu --compare [--json]   print the errors

README.md beside this file says what is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from compare import compare, table
from configurations import configurations
from measure import measure_all
from predict import freeze, predict, times_of_today

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Do what is asked for, or all of it."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for step in ("predict", "measure", "compare"):
        parser.add_argument(f"--{step}", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to try it out")
    parser.add_argument("--gpu", default="h200", help="name in the catalogue of the GPU that is predicted")
    parser.add_argument("--predictions", type=Path, help="file of the predictions; an existing one is never changed")
    parser.add_argument("--out", type=Path, help="file of what is measured")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only configurations with a match in their name")
    parser.add_argument("--budget", type=float, default=440.0, metavar="SECONDS", help="for all measurements")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="for one configuration")
    parser.add_argument("--python", default=sys.executable, help="whose libraries are traced for the predictions")
    parser.add_argument("--processes", type=int, default=1, help="that trace at a time")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    given = parser.parse_args()
    chosen = {step for step in ("predict", "measure", "compare") if getattr(given, step)}
    label = given.gpu if given.device == "cuda" else "cpu"
    predictions = given.predictions or RESULTS / f"gpu_truth_predictions_{label}.json"
    out = given.out or RESULTS / f"gpu_truth_{label}.json"
    listed = configurations(given.device, given.only)

    if "predict" in chosen or (not chosen and not predictions.exists()):
        gpu = given.gpu if given.device == "cuda" else None
        if predictions.exists():
            parser.error(f"{predictions} is there already: what was predicted stays; name another file")
        freeze(predictions, predict(listed, gpu_key=gpu, python=given.python, processes=given.processes))
    if not chosen or "measure" in chosen:
        if given.device == "cuda" and not torch.cuda.is_available():
            parser.error("there is no CUDA device here: nothing was measured, and what was measured elsewhere is kept")
        measure_all(
            listed,
            device=given.device,
            out=out,
            predictions=predictions if predictions.exists() else None,
            budget_s=given.budget,
            limit_s=given.limit,
        )
    if not chosen or "compare" in chosen:
        today = times_of_today(listed, given.gpu if given.device == "cuda" else None)
        compared = compare(json.loads(predictions.read_text()), json.loads(out.read_text()), today)
        print(json.dumps(compared) if given.json else table(compared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
