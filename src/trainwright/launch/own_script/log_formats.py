"""Figures of a step in what scripts print: the Trainer's dicts, tqdm's bars, JSON lines, `step 10 loss 2.3`."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

LONGEST_LINE = 4000
"""A longer one is no line of figures, and is not looked at."""

# tqdm 4: `{desc}: {percentage}%|{bar}| {n}/{total} [{elapsed}<{remaining}, {rate}{postfix}]`
_BAR = re.compile(
    r"^(?:(?P<desc>[^|%]{0,80}?):? +| *)(?P<pct>\d{1,3})%\|[^|]*\| *(?P<n>\d{1,12})/(?P<total>\d{1,12}) "
    r"\[[^\]<]*<[^\],]*(?:, *(?P<rate>[\d.]+|\?)(?P<unit>it/s|s/it))?(?P<postfix>[^\]]*)\]?"
)
_TRAINING_BAR = re.compile(r"^$|train|epoch|step|iter", re.IGNORECASE)
_STEP = re.compile(
    r"\b(?:global[_ ])?step\s*[:=#]?\s*\[?\s*(?P<step>\d[\d,]{0,14})(?:\s*(?:/|of)\s*(?P<total>\d[\d,]{0,14}))?",
    re.IGNORECASE,
)
_NUMBER = r"(?P<value>[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?|nan|inf)"


def _figure_pattern(words: str) -> re.Pattern[str]:
    """Match `loss: 2.3`, `loss=2.3` and `loss 2.3`, with no more words or letters before or after."""
    return re.compile(rf"(?<!\w)(?:{words})\s*[:=]?\s*\[?\s*{_NUMBER}(?![\w%])", re.IGNORECASE)


_FIGURES = {
    "loss": _figure_pattern(r"(?<!eval )(?<!val )(?<!validation )(?<!test )(?:train(?:ing)?[_ ])?loss"),
    "eval_loss": _figure_pattern(r"(?:eval|val(?:idation)?)[_ ]loss"),
    "learning_rate": _figure_pattern(r"lr|learning[_ ]rate"),
    "epoch": _figure_pattern(r"epoch"),
    "grad_norm": _figure_pattern(r"grad(?:ient)?[_ ]norm"),
    "perplexity": _figure_pattern(r"perplexity|ppl"),
}
_PACES = (
    (re.compile(r"(\d+\.?\d*)\s*s/(?:step|it)\b", re.IGNORECASE), False),
    (re.compile(r"(\d+\.?\d*)\s*(?:steps?|it)/s\b", re.IGNORECASE), True),
)
"""Seconds a step, or steps a second."""
_NAMED_FIGURE = re.compile(r"(?P<key>[A-Za-z_][\w/ ]{0,40}?)\s*=\s*" + _NUMBER)
_OF_A_WHOLE_RUN = ("train_runtime", "train_loss")


@dataclass(frozen=True)
class ProgressBar:
    """One refresh of a progress bar of training."""

    description: str
    done: int
    total: int
    step_s: float | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class LoggedFigures:
    """The figures of one printed line; `step` is None where it does not say which, `source` names the format."""

    step: int | None
    total: int | None
    values: Mapping[str, float]
    source: str


def read_bar(text: str) -> ProgressBar | None:
    """Return what a tqdm bar shows, None for other text and for bars that are not of training (`Map`, `Loading`)."""
    match = _BAR.match(text) if len(text) <= LONGEST_LINE else None
    if match is None:
        return None
    description = (match["desc"] or "").strip()
    if not _TRAINING_BAR.search(description):
        return None
    rate = match["rate"]
    step_s = None
    if rate not in (None, "?") and float(rate) > 0:
        step_s = float(rate) if match["unit"] == "s/it" else 1 / float(rate)
    figures = {found["key"].strip(): _number(found["value"]) for found in _NAMED_FIGURE.finditer(match["postfix"])}
    return ProgressBar(description, int(match["n"]), int(match["total"]), step_s, figures)


def read_line(line: str) -> LoggedFigures | None:
    """Return the figures of a printed line, None where it holds no loss or other figure of training."""
    text = line.strip()
    if not text or len(text) > LONGEST_LINE:
        return None
    return _dictionary(text) or _step_line(text)


def _dictionary(text: str) -> LoggedFigures | None:
    """Read the Trainer's dict (numbers, or text that is one: transformers 5) or a line of JSON."""
    if not (text.startswith("{") and text.endswith("}")):
        return None
    source, content = "JSON line", None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        try:
            content, source = ast.literal_eval(text), "transformers log"
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
    if not isinstance(content, dict):
        return None
    values = {str(key): _figure(value) for key, value in content.items()}
    figures = {key: value for key, value in values.items() if value is not None}
    step = next((figures.pop(key) for key in ("step", "global_step") if key in figures), None)
    if any(key in figures for key in _OF_A_WHOLE_RUN) or not _tells(figures):
        return None
    return LoggedFigures(None if step is None else int(step), None, figures, source)


def _step_line(text: str) -> LoggedFigures | None:
    place = _STEP.search(text)
    values = {name: _number(found["value"]) for name, pattern in _FIGURES.items() if (found := pattern.search(text))}
    if not _tells(values) or place is None:
        return None
    for pattern, is_rate in _PACES:
        found = pattern.search(text)
        if found is not None and float(found[1]) > 0:
            values["step_s"] = 1 / float(found[1]) if is_rate else float(found[1])
            break
    total = None if place["total"] is None else int(place["total"].replace(",", ""))
    return LoggedFigures(int(place["step"].replace(",", "")), total, values, "step line")


def _tells(figures: Mapping[str, float]) -> bool:
    return any(key == "loss" or key.endswith("_loss") for key in figures)


def _figure(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _number(text: str) -> float:
    number = float(text.replace(",", ""))
    return number if math.isfinite(number) else math.nan
