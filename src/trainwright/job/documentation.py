"""What stands below each key of a section in its source: read when asked for, as that takes longer than a whole job."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic import BaseModel


def documentation(section: type[BaseModel]) -> dict[str, str]:
    """Return the text below each key that has one; none where only compiled files are installed."""
    try:
        source = inspect.getsource(section)
    except OSError:
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for key, below in pairwise(definition.body):
        match key, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def document(schema: dict[str, Any], section: type[BaseModel]) -> None:
    """Describe the properties of a section's JSON Schema."""
    for name, text in documentation(section).items():
        schema["properties"][name]["description"] = text
