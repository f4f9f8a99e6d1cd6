"""fedmpi: a parallel simulator for sampling strategies in federated learning.

The public names are imported when they are first asked for, so that the commands start quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmpi.clients.cohort import Cohort
    from fedmpi.common.errors import UserError
    from fedmpi.common.registry import client_sampler, combiner, parts, row_rule, server_optimizer, weights
    from fedmpi.local.algorithm import LocalAlgorithm

__version__ = "0.1.0"

__all__ = [
    "Cohort",
    "LocalAlgorithm",
    "UserError",
    "__version__",
    "client_sampler",
    "combiner",
    "parts",
    "row_rule",
    "server_optimizer",
    "weights",
]

_HOMES = {
    "Cohort": "fedmpi.clients.cohort",
    "LocalAlgorithm": "fedmpi.local.algorithm",
    "UserError": "fedmpi.common.errors",
    **dict.fromkeys(
        ("client_sampler", "combiner", "parts", "row_rule", "server_optimizer", "weights"), "fedmpi.common.registry"
    ),
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmpi' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
