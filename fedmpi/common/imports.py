"""Imports of modules at their first use and of custom components by name; names and lines of their code."""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError, raised, suggestion

OBJECT = "(...)"
"""End of the name of an object that the name does not restore."""

INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python and of installed packages."""
NOT_THEIRS = (Path(__file__).resolve().parents[1], *INSTALLED)
"""Folders of code that is not the user's: fedmpi, Python, installed packages."""


class Later:
    """Placeholder for a module until one of its names is used: the commands start without torch, which takes seconds.

    For type checkers, the module is imported under TYPE_CHECKING instead.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # found directly from now on
        return found


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
            f"{key} = {path!r}: {module_name!r} is no module. Write module:object, without folders and .py, as "
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
        line = innermost(error)
        hint = f" ({line})" if line else ""
        if missing:
            hint = f": searched are PYTHONPATH and the working directory, {os.getcwd()}; a run keeps copies in plugins"
        raise UserError(f"{key} = {path!r}: importing the module {module_name!r} failed with {reason}{hint}") from error
    if not callable(found):
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        hint = suggestion(name, own, "")
        hint = f": {hint}" if hint else ""
        if module_name in sys.stdlib_module_names:
            hint = ", for it is Python's own, not yours: give your file another name"
        raise UserError(f"{key} = {path!r}: the module {module_name!r} has no function or class {name!r}{hint}")
    return found


def object_name(chosen: Any) -> str:
    """Return "module:object" of a function or class, or of an instance's class."""
    named = chosen if hasattr(chosen, "__qualname__") and hasattr(chosen, "__module__") else type(chosen)
    return f"{named.__module__}:{named.__qualname__}"


def user_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the lines of a traceback that are not in fedmpi, Python or installed packages."""
    places = [(frame, Path(frame.filename).resolve()) for frame in frames if frame.line]
    return [frame for frame, path in places if not any(path.is_relative_to(home) for home in NOT_THEIRS)]


def innermost(error: BaseException) -> str:
    """ "file:line" of the user's last line in the traceback of an exception; "" if there is none."""
    found = user_frames(traceback.extract_tb(error.__traceback__))
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""


def holds_values(chosen: Any) -> bool:
    """Check whether a name does not restore a choice: an object, a lambda, a method, a function within another."""
    name: str | None = getattr(chosen, "__qualname__", None)
    return name is None or _within(sys.modules.get(chosen.__module__), name) is not chosen


def written_name(chosen: Any) -> str:
    """Return the name of an object as a file can hold it; it ends with (...) if that does not restore the object."""
    name: str | None = getattr(chosen, "config_name", None)
    return name or object_name(chosen) + (OBJECT if holds_values(chosen) else "")


def _within(module: Any, name: str) -> Any:
    """Return a module's object of this name or, with dots, one inside a class, as "Outer.inner"; None if missing."""
    found = module
    for step in name.split("."):
        found = getattr(found, step, None)
    return found
