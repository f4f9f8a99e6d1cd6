"""The chosen local algorithm and what it sends beside the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedmpi.common.calling import calling
from fedmpi.common.errors import UserError
from fedmpi.common.registry import MARKS, Component

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

PLAIN = "plain"


def local_algorithm(config: ConfigTables) -> tuple[Component, Any] | None:
    """The component that `local.algorithm` chooses and an instance of it; None for plain local steps."""
    if config.local.algorithm.name == PLAIN:
        return None
    chosen = config.local.algorithm
    part = chosen.component
    if getattr(part.object, MARKS, {}).get("kind") != part.kind:
        raise UserError(f"local.algorithm = {part.name!r} is no subclass of fedmpi.LocalAlgorithm. Make it one")
    with calling(part):
        return part, chosen.make()


def further_vectors(config: ConfigTables) -> tuple[int, int, int]:
    """Values sent in addition to a client's model and update: vectors (d,) down, vectors up, numbers up."""
    found = local_algorithm(config)
    if found is None:
        return 0, 0, 0
    sent = "server_state" if found[1].sent is None else "sent"
    down, up, numbers = (len(names_in(*found, field)) for field in (sent, "sums", "numbers"))
    return down, up, numbers


def names_in(part: Component, algorithm: Any, field: str) -> tuple[str, ...]:
    """Return the names that an algorithm declares in a field. A single name needs no tuple."""
    declared = getattr(algorithm, field)
    if isinstance(declared, str):
        return (declared,)
    if not isinstance(declared, Sequence):
        raise UserError(f'{part.key} = {part.name!r} has {field} = {declared!r}. List names, as in {field} = ("c",)')
    return tuple(declared)
