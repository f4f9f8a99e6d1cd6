"""Interface of client samplers: what a sampler sees of a round, what the server keeps of the clients for it, and the
call with checks of every return value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpi.clients.cohort import Cohort, full_participation, indices
from fedmpi.clients.strata import Strata
from fedmpi.common.calling import Remembering, calling, refuse_result, result_array, takes
from fedmpi.common.decorators import NUMBERS, VECTORS
from fedmpi.common.errors import ComponentFailure, UserError
from fedmpi.common.plan import read_only
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints

if TYPE_CHECKING:
    from torch import Tensor

KEPT, STATE, PAST = "numbers.", "sampler.", "past."
"""Prefixes of the names in a checkpoint."""

STRATA, NORMS, HISTORY = "strata", "norms", "history"
"""Inputs of samplers besides numbers: strata of the clients, only the norms of their gradients, or the past rounds."""

SKETCH_SIZE = 64
"""Length of a sketch, unless the sampler has the option `sketch_size`."""

ROUNDING = 1e-6
"""Largest rounding error above 1 of a probability computed in float32."""


@dataclass(frozen=True, eq=False)
class PastRound:
    """One finished round.

    Attributes
    ----------
    round : int
        t, counted from 0.
    selected : int64 (a,)
        Clients that were invited, sorted.
    arrived : int64 (m,)
        Clients whose updates counted, sorted.
    metrics : dict of str to float
        Numbers in the record of the round, such as `train_loss`; scores such as `test_accuracy` if it was evaluated.
    seconds : float
        Simulated length of the round; NaN without `devices`.
    """

    round: int
    selected: Ints
    arrived: Ints
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = np.nan


@dataclass(frozen=True, eq=False)
class View:
    """One round from the view of a client sampler.

    Attributes
    ----------
    round : int
        t, counted from 0.
    count : int
        m, the clients to draw; with over-selection the number to invite, in an asynchronous round the free places.
    sizes : int64 (N,)
        Samples of every client; read-only, like all arrays of a view except the copies from `last` and `age`.
    present : int64 (a,) or int
        Clients that can be drawn, sorted; N if all of 0 … N − 1 are available (`available` in fewer bytes).
    busy : int64 (b,)
        Clients in flight in an asynchronous round, sorted; they cannot be drawn.
    streams : Streams
        The run's random streams, for samplers that need several.
    strata : Strata or None
        The current strata and the clients' gradient norms, for samplers that need "strata" or "norms".
    over_selection : float
        Ratio of invited clients to clients needed.
    wanted : callable
        (clients) -> m, the clients to select, if a share is one of so many clients.
    clock : float
        Simulated seconds since the start of the run; NaN without `devices`.
    numbers, measured, counts, stream, past
        Sources of `last` and `age`, `fresh`, `class_counts`, the generator, and `history`.
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
    measured: dict[str, AnyArray] = field(default_factory=dict)
    counts: Callable[[], Ints] | None = None
    stream: tuple[Purpose, int] = (Purpose.COHORT, 0)
    past: Sequence[PastRound] | None = None
    clock: float = np.nan
    busy: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", read_only(self.sizes))
        if not isinstance(self.present, int):
            object.__setattr__(self, "present", read_only(self.present))

    @cached_property
    def available(self) -> Ints:
        """Clients that can be drawn, int64 (a,), sorted."""
        return read_only(indices(self.present))

    @cached_property
    def eligible(self) -> Ints:
        """Available clients with samples, int64 (e,), sorted."""
        return read_only(self.available[self.sizes[self.available] > 0])

    @cached_property
    def class_counts(self) -> Ints:
        """Samples of every class held by each client, int64 (N, C)."""
        if self.counts is None:
            raise UserError("this View has no class counts. Construct it with View(counts=…)")
        return read_only(self.counts())

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random generator of the round; for samplers the stream (seed, COHORT, round)."""
        purpose, part = self.stream
        return self.streams.generator(purpose, self.round, part)

    @property
    def history(self) -> Sequence[PastRound]:
        """Finished rounds, oldest first, for samplers that need "history"."""
        if self.past is None:
            raise UserError('view.history is not kept. Decorate the sampler with @client_sampler(needs=("history",))')
        return self.past

    @property
    def sketches(self) -> AnyArray:
        """Sketches of the clients' last updates, float32 (N, k): `last("update_sketch")`."""
        return self.last("update_sketch")

    def last(self, name: str) -> Floats:
        """Return a number from each client's last participation, float64 (N,), or a vector, float32 (N, k).

        NaN for clients never selected.
        """
        return self._kept(name).values[name].copy()

    def age(self, name: str) -> Ints:
        """Return rounds since each client's number was taken (1: in the previous round), int64 (N,); −1 if never."""
        seen = self._kept(name).seen[name]
        return np.where(seen < 0, -1, self.round - seen)

    def fresh(self, name: str) -> Floats:
        """Return a number measured on the current model, float64 (N,), or a vector, float32 (N, k).

        NaN except for this round's candidates.
        """
        if name not in self.measured:
            raise UserError(
                f"view.fresh({name!r}) is not measured. Decorate the sampler with "
                f"@client_sampler(measures=({name!r},)) and read it in draw(view), after candidates(view)"
            )
        return read_only(self.measured[name])

    def _kept(self, name: str) -> ClientNumbers:
        if self.numbers is None or name not in self.numbers.values:
            raise UserError(
                f"view.last({name!r}) and view.age({name!r}) are not kept. Decorate the sampler with "
                f"@client_sampler(needs=({name!r},))"
            )
        return self.numbers


class ClientNumbers:
    """Numbers (N,) and vectors (N, k) from the clients' last participations, by name, kept by rank 0."""

    def __init__(self, names: Sequence[str], clients: int, widths: Mapping[str, int] = MappingProxyType({})):
        self.names, self.clients, self.widths = tuple(names), clients, widths
        self.values = {name: self.unknown(name) for name in self.names}
        self.seen = {name: np.full(clients, -1, np.int64) for name in self.names}  # rounds of these values

    def unknown(self, name: str) -> AnyArray:
        """Return an array of NaN for the numbers or vectors of all clients."""
        if name in VECTORS:
            return np.full((self.clients, self.widths.get(name, SKETCH_SIZE)), np.nan, np.float32)
        return np.full(self.clients, np.nan)

    def enter(self, name: str, round: int, clients: Ints, values: AnyArray) -> None:
        """Store the numbers (m,) or vectors (m, k) of these clients (m,), taken in the given round."""
        self.values[name][clients] = values
        self.seen[name][clients] = round

    @property
    def _arrays(self) -> dict[str, AnyArray]:
        """The arrays by their names in a checkpoint."""
        rounds = {f"{KEPT}{name}.round": seen for name, seen in self.seen.items()}
        return {f"{KEPT}{name}": values for name, values in self.values.items()} | rounds

    def state(self) -> dict[str, Tensor]:
        """Return everything stored, for a checkpoint."""
        import torch  # slow to import, and the configuration is checked before

        return {name: torch.from_numpy(array.copy()) for name, array in self._arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the numbers of a checkpoint; raise KeyError if some are missing."""
        for name, array in self._arrays.items():
            array[:] = state[name].numpy()


class PastRounds:
    """Finished rounds, kept by rank 0."""

    def __init__(self) -> None:
        self.rounds: list[PastRound] = []

    def enter(self, round: int, selected: Ints, arrived: Ints) -> None:
        """Add a planned round."""
        self.rounds.append(PastRound(round, read_only(selected), read_only(arrived)))

    def finish(self, record: Mapping[str, Any]) -> None:
        """Add the numbers in the record of a round that do not depend on the machine."""
        found = {name: value for name, value in record.items() if name not in ("round", "seconds")}
        numbers = {name: value for name, value in found.items() if type(value) in (int, float) and math.isfinite(value)}
        seconds = record.get("virtual_seconds", math.nan)
        t = record["round"]
        self.rounds[t] = replace(self.rounds[t], metrics=numbers, seconds=seconds)

    def state(self) -> dict[str, Tensor]:
        """Return everything stored, for a checkpoint."""
        import torch  # slow to import, and the configuration is checked before

        lists = [array for one in self.rounds for array in (one.selected, one.arrived)]
        facts = [(one.round, len(one.selected), len(one.arrived), one.metrics, one.seconds) for one in self.rounds]
        clients = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *lists]))
        return {
            f"{PAST}clients": clients,
            f"{PAST}facts": torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the rounds of a checkpoint; raise KeyError if they are missing."""
        facts = json.loads(state[f"{PAST}facts"].numpy().tobytes())
        ends = np.cumsum([length for _, selected, arrived, *_ in facts for length in (selected, arrived)])
        lists = np.split(read_only(state[f"{PAST}clients"].numpy()), ends.astype(np.int64))
        self.rounds = [
            PastRound(fact[0], lists[2 * place], lists[2 * place + 1], *fact[3:]) for place, fact in enumerate(facts)
        ]


class ClientSampler(Remembering):
    """Component that draws cohorts."""

    prefix = STATE

    def __init__(self, part: Component, options: dict[str, Any]):
        super().__init__(part, options)
        needs = part.marks.get("needs", ())
        self.numbers = tuple(name for name in needs if name in NUMBERS)
        self.measures: tuple[str, ...] = tuple(part.marks.get("measures", ()))
        self.needs_strata, self.needs_norms, self.needs_history = (one in needs for one in (STRATA, NORMS, HISTORY))
        is_class = hasattr(self._made, "draw") or not callable(self._made)
        self._draw: Any = getattr(self._made, "draw", None) if is_class else self._made
        takes(part, self._draw, "view", method="draw" if is_class else "")
        if self.measures:
            takes(part, getattr(self._made, "candidates", None), "view", method="candidates")

    @property
    def depends_on_rounds(self) -> bool:
        """True if its draws depend on earlier rounds or on the current model."""
        needs = self.numbers or self.measures or self.needs_strata or self.needs_norms or self.needs_history
        return bool(needs or self.remembers)

    def candidates(self, view: View) -> Ints:
        """Return the clients that it needs measured, int64 (c,), sorted and unique."""
        if self._idle(view):
            return view.available
        with calling(self.part, view.round):
            found = self._made.candidates(view)
        return np.unique(self._clients(found, view, "candidates"))

    def draw(self, view: View) -> Cohort:
        """Draw the cohort of a round, clients sorted and unique."""
        if self._idle(view):
            return full_participation(view.present)
        with calling(self.part, view.round):
            found = self._draw(view)
        if not isinstance(found, Cohort):
            raise self._refused(view, f"returned {found!r:.200}: return a fedmpi.Cohort(clients)")
        return self._checked(found, view) if self.part.foreign else found

    def _idle(self, view: View) -> bool:
        """Check whether no client is available; a custom sampler is then not called."""
        return self.part.foreign and not len(view.available)

    def _checked(self, cohort: Cohort, view: View) -> Cohort:
        clients, inclusion = self._clients(cohort.clients, view, "clients"), cohort.inclusion
        times = result_array(self.part, cohort.multiplicity, clients.shape, "multiplicity", view.round)
        if (times < 1).any() or (times != np.rint(times)).any():
            raise self._refused(view, "returned a multiplicity that is no count of draws: give whole numbers from 1")
        if inclusion is not None:
            inclusion = result_array(self.part, inclusion, clients.shape, "inclusion", view.round)
            impossible = (inclusion <= 0) | ((inclusion > 1 + ROUNDING) & (not cohort.counts_draws))
            if impossible.any():
                worst = impossible.argmax()
                raise self._refused(
                    view,
                    f"returned the inclusion probability {inclusion[worst]:g} for client {clients[worst]}, which is "
                    "not in (0, 1]. Expected numbers of draws may exceed 1. They need a multiplicity in every round, "
                    "also if all draws differ",
                )
        numbers = list(cohort.numbers.values())
        result_array(self.part, numbers, (len(numbers),), f"numbers {dict(cohort.numbers)}", view.round)
        found, first, back = np.unique(clients, return_index=True, return_inverse=True)
        work = {name: self._work(name, values, clients, view) for name, values in cohort.own_work.items()}
        for name, values in (work if inclusion is None else work | {"inclusion": inclusion}).items():
            if (differs := values != values[first][back]).any():
                raise self._refused(view, f"lists client {clients[differs][0]} twice, with different {name}")
        return Cohort(
            found,
            None if inclusion is None else inclusion[first],
            np.bincount(back, times, minlength=len(found)).astype(np.int64),
            cohort.stratum[first] if cohort.stratum is not None and len(cohort.stratum) == len(clients) else None,
            cohort.strata,
            numbers=cohort.numbers,
            **{name: values[first] for name, values in work.items()},
        )

    def _work(self, name: str, values: AnyArray, clients: Ints, view: View) -> Any:
        """Return the checked steps, rates or sample budgets (m,) of the clients."""
        values = result_array(self.part, values, clients.shape, name, view.round)
        wanted = "above 0" if name == "lr" else "that are whole numbers from 1"
        wrong = values <= 0 if name == "lr" else (values < 1) | (values != np.rint(values))
        if wrong.any():
            worst = wrong.argmax()
            problem = f"returned {name} = {values[worst]:g} for client {clients[worst]}: give values {wanted}"
            raise self._refused(view, problem)
        return values if name == "lr" else values.astype(np.int64)

    def _clients(self, found: Any, view: View, what: str) -> Ints:
        clients: Ints = result_array(self.part, found, None, what, view.round, whole=True)
        away = clients[~np.isin(clients, view.available)]
        if away.size:
            raise self._refused(view, f"returned client {away[0]}, which is not in view.available: draw from it")
        return clients

    def _refused(self, view: View, problem: str) -> ComponentFailure:
        return refuse_result(self.part, problem, view.round)
