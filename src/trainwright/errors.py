"""The one error for users, and every exit code the tool gives a meaning to."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class ExitCode(enum.IntEnum):
    """What the exit status of any command means; signals (130, 137, 143) are never given a meaning of our own."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_PLAN_FITS = 3
    MISSING = 4
    STORAGE = 73
    STOPPED = 75
    HANG = 76
    OUT_OF_MEMORY = 77
    NO_VALID_CHECKPOINT = 79


class UserError(Exception):
    """A mistake or a limit that the user can act on.

    `message` says what is wrong, `hints` what to do, one command or change each. `problems` holds all that was found
    when several things are wrong at once.
    """

    def __init__(
        self,
        message: str,
        *,
        hints: Sequence[str] = (),
        problems: Sequence[str] = (),
        exit_code: ExitCode = ExitCode.USAGE,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        self.problems = tuple(problems)
        self.exit_code = exit_code

    def render(self) -> str:
        """Return the text for stderr: `error:` with all problems, then each hint on a line of its own."""
        lines = [f"error: {self.message}"]
        lines += [f"  {problem}" for problem in self.problems]
        if self.hints:
            lines.append("")
            lines += [f"hint: {hint}" for hint in self.hints]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the error as plain data, for `--json`."""
        return {
            "message": self.message,
            "problems": list(self.problems),
            "hints": list(self.hints),
            "exit_code": int(self.exit_code),
        }


def not_installed(what: str, package: str, *, extra: str | None = None, instead: str) -> UserError:
    """Return the error for a package that `what` needs; `extra` is ours that brings it, `instead` does without."""
    requirement = f"'trainwright[{extra}]'" if extra else package
    return UserError(
        f"{what} needs {package}, which is not installed",
        hints=[f"pip install {requirement}", f"or {instead}"],
        exit_code=ExitCode.MISSING,
    )
