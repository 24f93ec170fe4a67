"""What a plain YAML 1.2 scalar means, and which text no value may hold."""

from __future__ import annotations

import math
import re

# The core schema, YAML 1.2.2 section 10.3.2: `no`, `010` in octal, `12:30:00` and dates are YAML 1.1 and stay text
# (or, for `010`, the number ten).
_NULL = re.compile(r"(?:~|null|Null|NULL)?")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

_MAX_DIGITS = 18
"""Every integer of this many digits fits in 64 bits."""

FORBIDDEN_TEXT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, marks that reorder text on screen, and halves of characters; tab and line ends are allowed."""


def plain_value(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar.

    Raises ValueError, with a sentence for the user, for numbers that are not finite or too long.
    """
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    for pattern, base in ((_DECIMAL, 10), (_OCTAL, 8), (_HEXADECIMAL, 16)):
        if pattern.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                raise ValueError(f"a whole number has at most {_MAX_DIGITS} digits")
            return int(text, base)
    if _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and not math.isfinite(float(text))):
        raise ValueError("the number is not finite")
    return float(text) if _FLOAT.fullmatch(text) else text


def is_plain_text(text: str) -> bool:
    """Say whether `text`, unquoted, is read as text, and not as a number, a truth value or nothing."""
    try:
        return isinstance(plain_value(text), str)
    except ValueError:
        return False
