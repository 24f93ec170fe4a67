"""Writes the reference pages from the code; CI fails when they are stale.

python docs/generate.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trainwright.errors import ExitCode
from trainwright.hardware.catalog import Figure, catalog
from trainwright.job.documentation import documentation
from trainwright.job.schema import Interval, Job

DOCS = Path(__file__).parent
HEADER = "<!-- Written by docs/generate.py; change the code and run `make docs`. -->\n\n"
COMMANDS = [
    "",
    "train",
    "submit",
    "status",
    "logs",
    "cancel",
    "resume",
    "eval",
    "demo",
    "watch",
    "doctor",
    "report",
    "runs",
    "gpus",
    "plan",
    "tune",
    "scaling",
    "presets",
    "config",
    "config show",
    "config schema",
]
EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "ran and failed, or a check found a problem",
    ExitCode.USAGE: "wrong usage, job or data, or a resume that its contract refuses",
    ExitCode.NO_PLAN_FITS: "no plan fits",
    ExitCode.MISSING: "something is missing: a GPU, a package, an offline file",
    ExitCode.STORAGE: "the storage failed or has no room",
    ExitCode.STOPPED: "stopped cleanly and saved: run the same command to go on",
    ExitCode.HANG: "a rank hangs",
    ExitCode.OUT_OF_MEMORY: "out of memory after all remedies",
    ExitCode.NO_VALID_CHECKPOINT: "no checkpoint is whole",
}


def commands_page() -> str:
    """Return the help of every command, and what exit codes mean."""
    lines = ["# Commands\n"]
    for command in COMMANDS:
        text = subprocess.run(
            [sys.executable, "-m", "trainwright", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"COLUMNS": "100", "PATH": ""},
        ).stdout
        lines.append(f"## trainwright {command}\n".replace(" \n", "\n"))
        lines.append(f"```\n{text.strip()}\n```\n")
    lines.append("## Exit codes\n")
    lines.append("| code | meaning |\n| --- | --- |")
    lines += [f"| {int(code)} | {EXIT_CODES[code]} |" for code in ExitCode]
    lines.append("\nA process that a signal ended has the shell's own code for it (130, 137, 143).")
    return "\n".join(lines) + "\n"


def job_page() -> str:
    """Return the table of all job keys."""
    lines = ["# Job keys\n", "`auto` is settled by the plan, which prints its reason.\n"]
    lines.append("| key | value | default | what it is |\n| --- | --- | --- | --- |")
    lines += [f"| `{key}` | {_cell(kind)} | {_cell(default)} | {text} |" for key, kind, default, text in _keys(Job, "")]
    return "\n".join(lines) + "\n"


def gpus_page() -> str:
    """Return the GPU catalogue with the source of every figure."""
    known = catalog()
    lines = ["# GPU catalogue\n"]
    lines.append(
        "Dense rates in TFLOP/s, fp32 accumulation; bandwidth in GB/s. "
        "A figure with `?` is derived or told by users, not by the maker.\n"
    )
    columns = ("memory_gib", "bf16_tflops", "fp16_tflops", "fp32_tflops", "bandwidth_gb_s", "tdp_w")
    lines.append("| name | key | capability | " + " | ".join(columns) + " | NVLink GB/s | sources |")
    lines.append("| --- " * (len(columns) + 5) + "|")
    for key, gpu in known.gpus.items():
        figures = [getattr(gpu, column) for column in columns]
        link = gpu.nvlink.gb_s if gpu.nvlink else None
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "-"
        sources = sorted({figure.source for figure in [*figures, link] if figure is not None})
        cells = [gpu.name, f"`{key}`", capability, *map(_figure, figures), _figure(link), ", ".join(sources)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("\n## Sources\n")
    lines += [f"- **{name}**: {text}" for name, text in known.sources.items()]
    return "\n".join(lines) + "\n"


def _keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    texts = documentation(section)
    for name, field in section.model_fields.items():
        nested = _section_of(field.annotation)
        text = texts.get(name, "").replace("\n", " ")
        if nested is not None and field.default is not None:
            yield from _keys(nested, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", _kind(field.annotation), _default(field), text
        if nested is not None:
            yield from _keys(nested, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    options = [annotation, *get_args(annotation)]
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return next((option for option in found if option is not Interval), None)


def _kind(annotation: Any) -> str:
    if annotation is Interval:
        return "interval"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{option}`" for option in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(option) for option in arguments if option is not type(None))
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"str": "text", "bool": "`true` or `false`", "int": "whole number", "float": "number"}.get(
        getattr(annotation, "__name__", ""), "any"
    )


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.default if field.default is not PydanticUndefined else field.default_factory()
    if default is None or default in ([], {}, ""):
        return "-"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _figure(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:g}{'?' if figure.unverified else ''}"


if __name__ == "__main__":
    for name, page in (("commands.md", commands_page()), ("job.md", job_page()), ("gpus.md", gpus_page())):
        (DOCS / name).write_text(HEADER + page, encoding="utf-8")
