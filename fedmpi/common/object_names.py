"""What a chosen function, class or object is called, and the text that its author wrote."""

from __future__ import annotations

import inspect
import tokenize
from functools import partial
from typing import Any


def object_name(chosen: Any) -> str:
    """The "module:object" of a function or class, of what a partial binds, or of an instance's class."""
    chosen = as_written(chosen)
    named = chosen if hasattr(chosen, "__qualname__") and hasattr(chosen, "__module__") else type(chosen)
    return f"{named.__module__}:{named.__qualname__}"


def own_text(chosen: Any) -> str:
    """The source text of a function or class alone; "" where it cannot be had."""
    try:
        return inspect.getsource(as_written(chosen))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""


def as_written(chosen: Any) -> Any:
    """What its author wrote, and perhaps decorated: of a partial what it binds."""
    return chosen.func if isinstance(chosen, partial) else chosen
