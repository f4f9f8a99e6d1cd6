"""The chosen algorithm of local work, and what it does not go with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedmpi.common.calling import calling
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Part
from fedmpi.config.choices import chosen, options

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

PLAIN = "plain"


def local_algorithm(config: ConfigTables) -> tuple[Part, Any] | None:
    """The part that `local.algorithm` chooses and an instance of it; None for plain local steps."""
    if config.local.algorithm == PLAIN:
        return None
    part = chosen(config, "local algorithm")
    if not hasattr(part.object, "server_step"):
        raise UserError(f"local.algorithm = {part.name!r} is no subclass of fedmpi.LocalAlgorithm: make it one")
    given = options(config, "local algorithm")
    with calling(part):
        return part, part.make(given)


def further_vectors(config: ConfigTables) -> tuple[int, int, int]:
    """What travels beside a client's model and update: vectors (d,) down, vectors up, numbers up."""
    found = local_algorithm(config)
    if found is None:
        return 0, 0, 0
    sent = "server_state" if found[1].sent is None else "sent"
    down, up, numbers = (len(names_in(*found, field)) for field in (sent, "sums", "numbers"))
    return down, up, numbers


def names_in(part: Part, algorithm: Any, field: str) -> tuple[str, ...]:
    """The names that an algorithm declares in a field; a single one may stand without a tuple."""
    declared = getattr(algorithm, field)
    if isinstance(declared, str):
        return (declared,)
    if not isinstance(declared, Sequence):
        raise UserError(f'{part.key} = {part.name!r} has {field} = {declared!r}: list names, as in {field} = ("c",)')
    return tuple(declared)


def algorithm_refusals(config: ConfigTables) -> list[tuple[bool, str]]:
    """Choices that contradict what the algorithm declares, each with the reason."""
    found = local_algorithm(config)
    if found is None:
        return []
    part, algorithm = found
    name = f'local.algorithm = "{part.name}"'
    sends = bool(algorithm.sums or algorithm.numbers)
    carries = sends or bool(algorithm.client_state)
    return [
        (
            config.topology.kind == "mediators",
            f'{name} works on each client\'s own update, which topology.kind = "mediators" never forms: choose a star',
        ),
        (
            config.participation.opening,
            f"{name} works on whole rounds, but participation.opening makes round 0 a single step: switch it off",
        ),
        (
            carries and config.privacy.clip_norm is not None,
            f"{name} keeps or sends more than the update, which privacy.clip_norm does not bound: no ε would hold",
        ),
        (
            carries and config.transport.kind != "float32",
            f"{name} keeps or sends more than the update, which transport.kind does not compress: what clients keep "
            'would differ from what arrives; set transport.kind = "float32"',
        ),
        (
            sends and config.aggregation.rule != "mean",
            f"{name} sends more than the update, which aggregation.rule does not combine: set "
            'aggregation.rule = "mean"',
        ),
        (
            sends and config.attack.kind in ("sign-flip", "noise"),
            f'{name} sends more than the update, of which attack.kind = "{config.attack.kind}" would change the update '
            'alone: set attack.kind = "label-flip", whose attackers train on wrong labels',
        ),
    ]
