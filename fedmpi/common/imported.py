"""Import of the object that "package.module:object" names, with clear errors for wrong paths."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError, raised
from fedmpi.common.own_code import OBJECT, innermost


def load(path: str, key: str) -> Any:
    """Return the object at "package.module:object"; the working directory is searched last."""
    module_name, _, name = path.partition(":")
    if name.endswith(OBJECT):
        raise UserError(
            f"{key} = {path!r} names an object that Python code gave, with values that no file stores. Give it "
            f"again in Python, or choose {path.removesuffix(OBJECT)!r} with its options as keys"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    if not re.fullmatch(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*", module_name) or module_name.endswith(".py"):
        meant = Path(module_name.removesuffix(".py")).name
        raise UserError(
            f"{key} = {path!r}: {module_name!r} is no module: write module:object, without folders and .py, as "
            f"{f'{meant}:{name}'!r}; searched are the working directory and PYTHONPATH"
        )
    try:
        module = importlib.import_module(module_name)
        found = _within(module, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module that calls sys.exit() must not end the run as if it were done
        reason = str(error) if isinstance(error, UserError) else raised(error)
        missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0])
        hint = (
            f": searched are PYTHONPATH and the working directory, {os.getcwd()}; a run keeps copies in plugins"
            if missing
            else _line_of(error)
        )
        raise UserError(f"{key} = {path!r}: importing the module {module_name!r} failed with {reason}{hint}") from error
    if not callable(found):
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = get_close_matches(name, own, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]!r}?" if near else ""
        place = getattr(module, "__file__", None)
        if module_name in sys.stdlib_module_names and place:
            hint = f", for it is Python's own, {place}: give your file another name"
        raise UserError(f"{key} = {path!r}: the module {module_name!r} has no function or class {name!r}{hint}")
    return found


def _within(module: Any, name: str) -> Any:
    """Return a module's object of this name or, with dots, one inside a class, as "Outer.inner"; None if missing."""
    found = module
    for step in name.split("."):
        found = getattr(found, step, None)
    return found


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code at which an import failed, " (file:line)"."""
    line = innermost(traceback.extract_tb(error.__traceback__))
    return f" ({line})" if line else ""
