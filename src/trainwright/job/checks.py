"""What no job may hold, whatever the key: secrets, and line ends where one line is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainwright.job.origins import KeyPath

_SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    "an AWS access key": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{16,}"),
    "an API key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    "a user name or password in a URL": re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://[^/\s@]{1,500}@"),
}
_SECRET_KEYS = re.compile(
    r"(?:.*_)?(?:api_?key|password|passwd|secret|access_token|auth_token|hf_token)", re.IGNORECASE
)
_PROSE = ("description", "task_options", "claims", "prompt_template")
"""Where text may run over several lines; elsewhere it ends up in file names, logs and job scripts."""

SECRET_HINT = "put secrets in the environment (HF_TOKEN, WANDB_API_KEY, AWS_ACCESS_KEY_ID): the workers inherit it"


def secrets(values: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each value that looks like a secret, and a sentence that does not repeat it."""
    for path, value in _texts(values):
        for kind, pattern in _SECRETS.items():
            if pattern.search(value):
                yield path, f"this looks like {kind}; a job is stored with its run, so it must hold no secret"
        if path and value and isinstance(path[-1], str) and _SECRET_KEYS.fullmatch(path[-1]):
            yield path, f"`{path[-1]}` names a secret; a job is stored with its run, so it must hold none"


def broken_lines(values: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each text with a tab or a line end in it where a single line is meant."""
    for path, value in _texts(values):
        if re.search(r"[\t\n\r]", value) and (not path or path[0] not in _PROSE):
            yield path, "the text must be one line, without tabs"


def _texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield all texts with their paths; the name of a key counts as a text at the path of its section."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield path, key
            yield from _texts(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _texts(member, (*path, index))
    elif isinstance(value, str):
        yield path, value
