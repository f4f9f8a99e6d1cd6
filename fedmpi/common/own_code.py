"""Code of custom components: names of functions and classes, their source text, and their lines in a traceback."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, MethodType
from typing import Any

OBJECT = "(...)"
"""End of the name of an object with values that no file holds."""
LAMBDA = "<lambda>"
"""Python's name of every lambda."""


NOT_THEIRS = (
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of code that is not the user's: fedmpi, Python, installed packages."""


def object_name(chosen: Any) -> str:
    """Return "module:object" of a function or class, of a partial's function, or of an instance's class."""
    chosen = as_written(chosen)
    named = chosen if hasattr(chosen, "__qualname__") and hasattr(chosen, "__module__") else type(chosen)
    return f"{named.__module__}:{named.__qualname__}"


def own_text(chosen: Any) -> str:
    """Return the source text of a function or class, the whole lines of a lambda, or the class of an object.

    The text is "" if the source is not available.
    """
    written = as_written(chosen)
    named = written if hasattr(written, "__qualname__") else type(written)
    try:
        return _lines_of_lambda(named) or inspect.getsource(named)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return _text_of_class(named) if inspect.isclass(named) else ""


def _text_of_class(made: type) -> str:
    """Return the source of a class without a file, e.g. from a notebook's cell, found through its functions."""
    for code in _code_of_class(made):
        lines = linecache.getlines(code.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        for found in ast.walk(tree):
            if not isinstance(found, ast.ClassDef) or found.name != made.__name__:
                continue
            if found.lineno <= code.co_firstlineno <= (found.end_lineno or 0):
                first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
                return "".join(lines[first - 1 : found.end_lineno])
    return ""


def _code_of_class(made: type) -> Iterator[CodeType]:
    """Yield the code of the functions that were written within a class."""
    for name, value in vars(made).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if getattr(function, "__qualname__", "") == f"{made.__qualname__}.{name}" and hasattr(function, "__code__"):
            yield function.__code__


def _lines_of_lambda(chosen: Any) -> str:
    """Return the lines of a lambda and of others that begin on its first line; "" for anything else.

    inspect ends with the first line that could end a statement, even inside brackets.
    """
    code = getattr(inspect.unwrap(chosen), "__code__", None)
    if code is None or code.co_name != LAMBDA:
        return ""
    lines, first = inspect.findsource(code)[0], code.co_firstlineno
    try:
        nodes = ast.walk(ast.parse("".join(lines)))
    except (SyntaxError, ValueError):  # e.g. a notebook's cell that awaits something
        return ""
    ends = [one.end_lineno or first for one in nodes if isinstance(one, ast.Lambda) and one.lineno == first]
    return "".join(lines[first - 1 : max(ends, default=0)])


def as_written(chosen: Any) -> Any:
    """Return the function or class as its author wrote it, possibly decorated; of a partial, its function."""
    return chosen.func if isinstance(chosen, partial) else chosen


def innermost(frames: Iterable[FrameSummary], source: Path | None = None, typed_in: bool = False) -> str:
    """ "file:line" of the last of the lines that are not in fedmpi, Python or installed packages."""
    found = ""
    for frame in frames:
        path = Path(frame.filename).resolve()
        if frame.filename.startswith("<"):
            theirs = typed_in
        else:
            there = any(place.is_file() for place in (path, *path.parents))  # a file, or one in an archive
            there = there or (typed_in and bool(frame.line))
            theirs = path == source or (there and not any(path.is_relative_to(home) for home in NOT_THEIRS))
        found = f"{frame.filename}:{frame.lineno}" if theirs else found
    return found


def holds_values(chosen: Any) -> bool:
    """Check whether a choice has values that its name does not restore: an object, a partial, a function in one."""
    if isinstance(chosen, partial | MethodType):
        return True
    if not hasattr(chosen, "__qualname__") or not hasattr(chosen, "__module__"):
        return True
    return bool(getattr(chosen, "__closure__", None)) and not _leads_to(chosen)


def found_by_name(chosen: Any) -> bool:
    """Check whether the name of a function leads to it. The name of a lambda does not.

    A partial has the name of its function. For objects, the name of the class counts.
    """
    named = chosen.func if isinstance(chosen, partial) else chosen
    return not hasattr(named, "__code__") or _leads_to(named)


def _leads_to(chosen: Any) -> bool:
    found: Any = sys.modules.get(chosen.__module__)
    for step in chosen.__qualname__.split("."):
        found = getattr(found, step, None)
    return found is chosen
