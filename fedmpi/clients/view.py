"""Client sampler's view of a round, and the server's memory of single clients between rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.clients.strata import Strata
from fedmpi.common.errors import UserError
from fedmpi.common.plan import read_only
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "numbers."
"""Prefix of the names in a checkpoint."""


class ClientNumbers:
    """Numbers from the clients' last participations, kept by rank 0."""

    def __init__(self, names: Sequence[str], clients: int):
        self.names, self.clients = tuple(names), clients
        self._values = {name: np.full(clients, np.nan) for name in self.names}
        self._seen = {name: np.full(clients, -1, np.int64) for name in self.names}

    def last(self, name: str) -> Floats:
        """Return a copy of the last number of each client, float64 (N,); NaN if there is none."""
        return self._values[name].copy()

    def age(self, name: str, round: int) -> Ints:
        """Return the rounds from each client's last number to `round`, int64 (N,); −1 if there is none."""
        seen = self._seen[name]
        return np.where(seen < 0, -1, round - seen)

    def enter(self, name: str, round: int, clients: Ints, values: Floats) -> None:
        """Store the numbers (k,) of these clients (k,), taken in the given round."""
        self._values[name][clients] = values
        self._seen[name][clients] = round

    def state(self) -> dict[str, Tensor]:
        """Return everything stored, for a checkpoint."""
        import torch  # slow to import, and the configuration is checked before

        arrays = {f"{PREFIX}{name}": values for name, values in self._values.items()}
        arrays |= {f"{PREFIX}{name}.round": seen for name, seen in self._seen.items()}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the numbers of a checkpoint."""
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise UserError(
                f"the checkpoint lacks {', '.join(missing)}, which clients.sampler draws by: resume with the "
                "version of fedmpi that wrote it, or choose another --out"
            )
        for name in self.names:
            self._values[name][:] = state[f"{PREFIX}{name}"].numpy()
            self._seen[name][:] = state[f"{PREFIX}{name}.round"].numpy()


@dataclass(frozen=True, eq=False)
class View:
    """One round from the view of a client sampler.

    Attributes
    ----------
    round : int
        t, counted from 0.
    count : int
        m, the clients to draw; with over-selection the number to invite.
    sizes : int64 (N,)
        Samples of every client; read-only, like all arrays of a view except the copies from `last` and `age`.
    present : int64 (a,) or int
        Clients that can be drawn, sorted; N if all of 0 … N − 1 are available (`available` in fewer bytes).
    streams : Streams
        The run's random streams, for samplers that need several.
    strata : Strata or None
        The current strata and the clients' gradient norms, for samplers that need "strata" or "norms".
    over_selection : float
        Ratio of invited clients to clients needed.
    wanted : callable
        (clients) -> m, the clients to select, if a share is one of so many clients.
    reader : str
        The component that receives the view, for error messages: "clients.sampler = 'mine:loudest'".
    numbers, measured, counts, stream
        Sources of `last` and `age`, `fresh`, `class_counts`, and the generator.
    """

    round: int
    count: int
    sizes: Ints
    present: Ints | int
    streams: Streams
    strata: Strata | None = None
    over_selection: float = 1.0
    wanted: Callable[[int], int] = field(default=lambda clients: clients, repr=False)
    numbers: ClientNumbers | None = None
    measured: dict[str, Floats] = field(default_factory=dict)
    counts: Callable[[], Ints] | None = None
    stream: tuple[Purpose, int] = (Purpose.COHORT, 0)
    reader: str = "clients.sampler"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", read_only(self.sizes))
        if not isinstance(self.present, int):
            object.__setattr__(self, "present", read_only(self.present))

    @cached_property
    def available(self) -> Ints:
        """Clients that can be drawn, int64 (a,), sorted."""
        if isinstance(self.present, int):
            return read_only(np.arange(self.present, dtype=np.int64))
        return self.present

    @cached_property
    def class_counts(self) -> Ints:
        """Samples of every class held by each client, int64 (N, C)."""
        if self.counts is None:
            raise UserError("class_counts are not at hand here: give View(counts=…)")
        return read_only(self.counts())

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random generator of the round; for samplers the stream (seed, COHORT, round)."""
        purpose, part = self.stream
        return self.streams.generator(purpose, self.round, part)

    def last(self, name: str) -> Floats:
        """Return a number from each client's last participation, float64 (N,); NaN for clients never selected."""
        return self._kept(name).last(name)

    def age(self, name: str) -> Ints:
        """Return rounds since each client's number was taken (1: in the previous round), int64 (N,); −1 if never."""
        return self._kept(name).age(name, self.round)

    def fresh(self, name: str) -> Floats:
        """Return a number measured on the current model, float64 (N,); NaN except for this round's candidates."""
        if name not in self.measured:
            raise UserError(
                f"{self.reader}: view.fresh({name!r}) is not measured: decorate the sampler with "
                f"@client_sampler(measures=({name!r},)) and read it in draw(view), after candidates(view)"
            )
        return read_only(self.measured[name])

    def _kept(self, name: str) -> ClientNumbers:
        if self.numbers is None or name not in self.numbers.names:
            raise UserError(
                f"{self.reader}: view.last({name!r}) and view.age({name!r}) are not kept: decorate the sampler with "
                f"@client_sampler(needs=({name!r},))"
            )
        return self.numbers


def asked_count(wanted: int, over_selection: float, clients: int) -> int:
    """Return the number of clients invited so that `wanted` arrive: ⌈m · over-selection⌉, at most N."""
    return min(clients, math.ceil(wanted * over_selection - 1e-9))
