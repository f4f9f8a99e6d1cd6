"""Modules that are imported at their first use: the commands start without torch, which takes seconds."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Placeholder for a module until one of its names is used.

    If a type checker also needs the module:

        if TYPE_CHECKING:
            import torch
        else:
            torch = Later("torch")
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # found directly from now on
        return found
