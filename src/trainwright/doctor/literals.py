"""The texts that a pattern cannot match without: quick to look for, where patterns are slow."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Sought:
    """A pattern; a line that holds none of `needs` cannot match it (empty: any line may)."""

    pattern: re.Pattern[str]
    needs: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str) -> Sought:
        """Compile a pattern."""
        return cls(re.compile(pattern), literals(pattern))

    def search(self, line: str) -> re.Match[str] | None:
        """Return the first match."""
        for need in self.needs:
            if need in line:
                return self.pattern.search(line)
        return None if self.needs else self.pattern.search(line)


_ESCAPED_CLASS = re.compile(r"\\[wWdDsSbB]")
_QUANTIFIED = re.compile(r".(?:[?*]|\{0)")


def literals(pattern: str) -> tuple[str, ...]:
    """Return, for each alternative of a pattern, the longest text that a match must contain; () where one has none."""
    if "(?i)" in pattern:
        return ()
    longest = [max(_runs(alternative), key=len, default="") for alternative in _alternatives(pattern)]
    return tuple(longest) if all(len(text) >= 3 for text in longest) else ()


def _alternatives(pattern: str) -> list[str]:
    """Split at each `|` that is outside of groups and classes; what is inside of them becomes one NUL."""
    parts, depth, in_class, index = [""], 0, False, 0
    while index < len(pattern):
        character = pattern[index]
        step = 2 if character == "\\" else 1
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            parts[-1] += "\0" if depth == 0 else ""
        elif character in "()":
            depth += 1 if character == "(" else -1
            parts[-1] += "\0"
        elif character == "|" and depth == 0:
            parts.append("")
        elif depth == 0:
            parts[-1] += pattern[index : index + step]
        index += step
    return parts


def _runs(alternative: str) -> list[str]:
    text = _ESCAPED_CLASS.sub("\0", alternative)
    text = _QUANTIFIED.sub("\0", re.sub(r"\\(.)", lambda escaped: "\1" + escaped[1], text))
    plain = re.sub("(?<!\1)[.^$+*?{}]", "\0", text).replace("\1", "")
    return plain.split("\0")
