"""Setting a number in a job file: one line changes, and all others stay as they are, comments too."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import UserError
from trainwright.job.origins import Origin
from trainwright.job.shape import JOB
from trainwright.job.yaml_document import read_file, read_keys
from trainwright.runs.writing import write_text_atomic

Values = Mapping[tuple[str, str], int]
"""Numbers by section and key."""


def set_in_job(path: Path, values: Values) -> None:
    """Set `section.key` to a number in the job file, for each of `values`.

    Raises:
        UserError: the file cannot be changed line by line, as one in braces; it is left as it is.
    """
    path = path.resolve()
    text = read_file(path, JOB.noun, where=JOB.where)
    edited = text
    for (section, key), value in values.items():
        edited = _with_value(edited, section, key, value)
    before = _read(text)
    if before is None or _read(edited) != _with_values(before, values):
        raise UserError(
            f"{path} is not written in lines that can be changed one by one",
            hints=[
                f"write into it yourself: {section}: {{{key}: {value}}}" for (section, key), value in values.items()
            ],
        )
    mode = path.stat().st_mode
    write_text_atomic(path, edited)
    path.chmod(mode)


def _with_value(text: str, section: str, key: str, value: int) -> str:
    """Return the text with the line of a key changed, or one added; whether it then says so, is for the reader."""
    heading = re.search(rf"^{section}:[ \t]*(?:#.*)?\n", text, re.MULTILINE)
    if heading is None:
        return f"{text.removesuffix(chr(10))}\n{section}:\n  {key}: {value}\n"
    body = re.compile(r"(?:[ \t]+\S.*\n?|[ \t]*(?:#.*)?\n)*").match(text, heading.end())
    assert body is not None
    line = re.search(rf"^([ \t]+){key}:[ \t]*[^\s#]*", body[0], re.MULTILINE)
    if line is not None:
        start, end = body.start() + line.start(), body.start() + line.end()
        return f"{text[:start]}{line[1]}{key}: {value}{text[end:]}"
    first = re.search(r"^([ \t]+)[^\s#]", body[0], re.MULTILINE)
    indent = "  " if first is None else first[1]
    return f"{text[: heading.end()]}{indent}{key}: {value}\n{text[heading.end() :]}"


def _read(text: str) -> dict[str, Any] | None:
    """Return what the text says as a job, None where it cannot be read."""
    document = read_keys(text, lambda line, column: Origin("file", f"{line}:{column}"))
    return document.values if document.readable and not document.problems else None


def _with_values(content: dict[str, Any], values: Values) -> dict[str, Any]:
    wanted = copy.deepcopy(content)
    for (section, key), value in values.items():
        wanted[section] = {**(wanted.get(section) or {}), key: value}
    return wanted
