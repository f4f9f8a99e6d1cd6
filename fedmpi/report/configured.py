"""The configurations that a page compares: runs that differ in their seed only, under a name of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedmpi.results.gather import OneRun
from fedmpi.results.grouping import OF_NO_MATTER, SeedGroup, blocks_of


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seed only."""

    label: str  # What tells it from all others, its data included where these differ
    # {"part.key": value} of its first run, without keys that change nothing about what is learned
    table: dict[str, Any]
    runs: tuple[OneRun, ...]  # By seed


def configurations(runs: Sequence[OneRun]) -> tuple[list[Configuration], list[str]]:
    """The configurations of some runs, as `fedmpi compare` groups them, and what it warns of."""
    blocks = blocks_of(runs)
    found = [
        Configuration(
            ", ".join([_enough(group, block.groups), *([block.title] if len(blocks) > 1 else [])]),
            _table(next(iter(group.runs.values()))),
            tuple(group.runs.values()),
        )
        for block in blocks
        for group in block.groups
    ]
    return found, [note for block in blocks for note in block.notes]


def _enough(group: SeedGroup, groups: Sequence[SeedGroup]) -> str:
    """As much of a group's name as tells it from the others."""
    own = group.words
    for count in range(1, len(own)):
        if sum(other.words[:count] == own[:count] for other in groups) == 1:
            return ", ".join(own[:count])
    return group.label


def _table(run: OneRun) -> dict[str, Any]:
    return {key: value for key, value in run.table.items() if key != "seed" and not key.startswith(OF_NO_MATTER)}
