"""fedmpi: a parallel simulator for sampling strategies in federated learning.

Public names are imported at their first use, so that the commands start quickly.
"""

from __future__ import annotations

import importlib
import logging
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmpi.api import Run, load_run, run
    from fedmpi.clients.cohort import Cohort
    from fedmpi.clients.designs import draw_without_replacement, proportional_inclusion
    from fedmpi.clients.sampler import PastRound
    from fedmpi.common.decorators import (
        aggregator,
        availability,
        client_sampler,
        compressor,
        data_sampler,
        features,
        partitioner,
        server_optimizer,
        weights,
    )
    from fedmpi.common.errors import ClientFailure, ComponentFailure, UserError
    from fedmpi.common.registry import components
    from fedmpi.config import Config, presets
    from fedmpi.data.arrays import ClientArrays
    from fedmpi.local.algorithms import LocalAlgorithm
    from fedmpi.results.loading import frame, load_runs
    from fedmpi.sweeps.run import sweep

__version__ = "0.1.0"

__all__ = [
    "ClientArrays",
    "ClientFailure",
    "Cohort",
    "Config",
    "LocalAlgorithm",
    "ComponentFailure",
    "PastRound",
    "Run",
    "UserError",
    "__version__",
    "client_sampler",
    "aggregator",
    "availability",
    "components",
    "compressor",
    "data_sampler",
    "draw_without_replacement",
    "features",
    "frame",
    "load_run",
    "load_runs",
    "presets",
    "proportional_inclusion",
    "partitioner",
    "run",
    "server_optimizer",
    "sweep",
    "weights",
]

_HOMES = {
    name: f"fedmpi.{module}"
    for module, names in {
        "api": "Run load_run run",
        "clients.cohort": "Cohort",
        "clients.designs": "draw_without_replacement proportional_inclusion",
        "clients.sampler": "PastRound",
        "common.decorators": "aggregator availability client_sampler compressor data_sampler features partitioner "
        "server_optimizer weights",
        "common.errors": "ClientFailure ComponentFailure UserError",
        "common.registry": "components",
        "config": "Config presets",
        "data.arrays": "ClientArrays",
        "local.algorithms": "LocalAlgorithm",
        "results.loading": "frame load_runs",
        "sweeps.run": "sweep",
    }.items()
    for name in names.split()
}
"""Module of each public name."""

logging.getLogger("fedmpi").addHandler(logging.NullHandler())  # users enable the log themselves


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmpi' has no attribute {name!r}")
    drawn = random.getstate()  # rich draws random numbers while it is imported
    found = getattr(importlib.import_module(_HOMES[name]), name)
    random.setstate(drawn)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
