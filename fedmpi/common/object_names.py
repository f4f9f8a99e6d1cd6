"""What a chosen function, class or object is called, and the text that its author wrote."""

from __future__ import annotations

import ast
import inspect
import tokenize
from functools import partial
from typing import Any

LAMBDA = "<lambda>"
"""What Python calls every lambda."""


def object_name(chosen: Any) -> str:
    """The "module:object" of a function or class, of what a partial binds, or of an instance's class."""
    chosen = as_written(chosen)
    named = chosen if hasattr(chosen, "__qualname__") and hasattr(chosen, "__module__") else type(chosen)
    return f"{named.__module__}:{named.__qualname__}"


def own_text(chosen: Any) -> str:
    """The source text of a function or class alone, of a lambda whole lines; "" where it cannot be had."""
    try:
        return _lines_of_lambda(as_written(chosen)) or inspect.getsource(as_written(chosen))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""


def _lines_of_lambda(chosen: Any) -> str:
    """From the line in which a lambda begins to the last of it and of others that begin there; "" of anything else.

    inspect ends with the first line that could be a statement's last, whatever brackets it stands in.
    """
    code = getattr(inspect.unwrap(chosen), "__code__", None)
    if code is None or code.co_name != LAMBDA:
        return ""
    lines, first = inspect.findsource(code)[0], code.co_firstlineno
    try:
        nodes = ast.walk(ast.parse("".join(lines)))
    except (SyntaxError, ValueError):  # such as a notebook's cell that awaits something
        return ""
    ends = [one.end_lineno or first for one in nodes if isinstance(one, ast.Lambda) and one.lineno == first]
    return "".join(lines[first - 1 : max(ends, default=0)])


def as_written(chosen: Any) -> Any:
    """What its author wrote, and perhaps decorated: of a partial what it binds."""
    return chosen.func if isinstance(chosen, partial) else chosen
