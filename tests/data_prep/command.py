"""The command line of data_prep inside the test's own process, and partitions of labels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from data_prep.__main__ import run
from data_prep.partitions import Partition, Request, partition
from fedmpi import UserError


def main(words: list[str]) -> int:
    """Run one command; errors go to stderr and give 2, as `fedmpi.process.exit_codes` does for the program."""
    try:
        return run(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def drawn(
    name: str,
    labels: np.ndarray,
    classes: int,
    clients: int | None,
    generator: np.random.Generator,
    users: np.ndarray | None = None,
    class_names: tuple[str, ...] = (),
    labeled: bool = True,
    **options: Any,
) -> Partition:
    """Draw a partition of rows with these labels."""
    request = Request(labels, classes, clients, generator, users, class_names)
    return partition(name, request, labeled, **options)
