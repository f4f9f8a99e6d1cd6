"""Modules that are imported when they are first used: the commands start without torch, which takes seconds."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Stands for a module until one of its names is asked for.

    Where a type checker has to know the module too:

        if TYPE_CHECKING:
            import torch
        else:
            torch = Later("torch")
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # found at once from now on
        return found
