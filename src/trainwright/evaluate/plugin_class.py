"""A user's own policy or engine, named as `module:Class`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from trainwright.errors import ExitCode, UserError


def own_class(noun: str, spelling: str, method: str) -> Any:
    """Return the class that `module:Class` names; `noun` is what it is, `method` what it must have.

    Raises:
        UserError: there is no such module (exit code 4), or no such class in it.
    """
    module, _, name = spelling.partition(":")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only the module itself: what is missing inside it is the module's own trouble, with its own traceback.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"the {noun} {spelling} cannot be imported: there is no module {error.name}",
            hints=[f"put its folder on PYTHONPATH, or name a {noun} of ours"],
            exit_code=ExitCode.MISSING,
        ) from error
    made = getattr(sys.modules[module], name, None)
    if not callable(made) or not callable(getattr(made, method, None)):
        raise UserError(
            f"the module {module} has no class {name} with a method {method}()",
            hints=[f"a {noun} of your own is written as module:Class"],
        )
    return made
