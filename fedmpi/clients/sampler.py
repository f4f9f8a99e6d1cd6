"""The chosen client sampler: called by the server, with checks of every return value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.view import View
from fedmpi.common.calling import calling, is_complex, refuse_result, takes
from fedmpi.common.decorators import NUMBERS
from fedmpi.common.errors import ComponentFailure, UserError
from fedmpi.common.registry import Component
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config

if TYPE_CHECKING:
    from torch import Tensor

STATE = "sampler."
"""Prefix of the names in a checkpoint."""

STRATA, NORMS = "strata", "norms"
"""Inputs that samplers can need besides numbers: strata of the clients, or only the norms of their gradients."""

ROUNDING = 1e-6
"""Largest rounding error above 1 of a probability computed in float32."""


class ClientSampler:
    """Component that draws cohorts."""

    def __init__(self, part: Component, options: dict[str, Any]):
        self.part = part
        with calling(part):
            self._made = part.make(options)
        needs = part.marks.get("needs", ())
        self.numbers = tuple(name for name in needs if name in NUMBERS)
        self.measures: tuple[str, ...] = tuple(part.marks.get("measures", ()))
        self.needs_strata, self.needs_norms = STRATA in needs, NORMS in needs
        self._draw = self._method("draw") if hasattr(self._made, "draw") else self._made
        if not callable(self._draw):
            raise UserError(f"{part.key} = {part.name!r} is a class without draw(view): give it one")
        self._candidates = self._method("candidates") if self.measures else None
        if not self.measures and part.foreign and callable(getattr(self._made, "candidates", None)):
            raise UserError(
                f"{part.key} = {part.name!r} has candidates(view), of whom nothing is measured: name what is, "
                '@client_sampler(measures=("loss",)), or rename the method'
            )
        takes(part, self._draw, "view", method="draw" if hasattr(self._made, "draw") else "")
        if self._candidates is not None:
            takes(part, self._candidates, "view", method="candidates")
        names = getattr(self._made, "state", ())
        self.remembers: tuple[str, ...] = (names,) if isinstance(names, str) else tuple(names)

    @classmethod
    def chosen_by(cls, config: Config) -> ClientSampler:
        """Return the sampler of a configuration."""
        return cls(config.clients.sampler.component, config.clients.sampler.options)

    @property
    def name(self) -> str:
        """Name in a configuration."""
        return self.part.name

    @property
    def depends_on_rounds(self) -> bool:
        """True if its draws depend on earlier rounds or on the current model."""
        return bool(self.numbers or self.measures or self.needs_strata or self.needs_norms or self.remembers)

    def candidates(self, view: View) -> Ints:
        """Return the clients that it needs measured, int64 (c,), sorted and unique."""
        assert self._candidates is not None
        with calling(self.part, view.round):
            found = self._candidates(view)
        return np.unique(self._clients(found, view, "candidates"))

    def draw(self, view: View) -> Cohort:
        """Draw the cohort of a round, clients sorted and unique."""
        with calling(self.part, view.round):
            found = self._draw(view)
        if not isinstance(found, Cohort):
            raise self._refused(view, f"returned {_shown(found)}: return a fedmpi.Cohort(clients)")
        return self._checked(found, view) if self.part.foreign else found

    def state(self) -> dict[str, Tensor]:
        """Return copies of its state for a checkpoint, without attributes that are missing or None."""
        import torch  # slow to import, and the configuration is checked before

        kept = {}
        for name in self.remembers:
            value = getattr(self._made, name, None)
            if value is None:
                continue
            numbers = (
                isinstance(value, np.ndarray | np.generic | int | float) and np.asarray(value).dtype.kind in "biuf"
            )
            if not numbers:
                problem = (
                    f"keeps {_shown(value)} as {name!r}, which a checkpoint cannot: state names attributes that are "
                    "NumPy arrays of numbers, or numbers"
                )
                raise refuse_result(self.part, problem)
            kept[f"{STATE}{name}"] = torch.from_numpy(np.array(value))
        return kept

    @property
    def never_set(self) -> list[str]:
        """Names in its `state` without an attribute so far."""
        return [name for name in self.remembers if not hasattr(self._made, name)]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        for name in self.remembers:
            if f"{STATE}{name}" in state:
                value = state[f"{STATE}{name}"]
                setattr(self._made, name, value.numpy().copy() if value.dim() else value.item())

    def _method(self, name: str) -> Callable[[View], Any]:
        method = getattr(self._made, name, None)
        if callable(method):
            found: Callable[[View], Any] = method
            return found
        raise UserError(
            f"{self.part.key} = {self.part.name!r} measures {', '.join(self.measures)} before it draws: make it a "
            "class with candidates(view) and draw(view)"
        )

    def _checked(self, cohort: Cohort, view: View) -> Cohort:
        clients = self._clients(cohort.clients, view, "a cohort")
        inclusion = self._column(cohort.inclusion, clients, view, "inclusion")
        times = self._column(cohort.multiplicity, clients, view, "multiplicity")
        assert times is not None
        if (times < 1).any() or (times != np.rint(times)).any():
            raise self._refused(view, "returned a multiplicity that is no count of draws: give whole numbers from 1")
        if inclusion is not None:
            impossible = ~(inclusion > 0) | ((inclusion > 1 + ROUNDING) & (not cohort.counts_draws))
            if impossible.any():
                worst = int(np.flatnonzero(impossible)[0])
                raise self._refused(
                    view,
                    f"returned the inclusion probability {inclusion[worst]:g} for client {clients[worst]}, which is "
                    "not in (0, 1]. Expected numbers of draws may exceed 1. They need a multiplicity in every round, "
                    "also if all draws differ",
                )
        wrong = [name for name, value in cohort.numbers.items() if not _is_finite(value)]
        if wrong:
            raise self._refused(
                view, f"returned numbers[{wrong[0]!r}] = {cohort.numbers[wrong[0]]!r}: return finite numbers"
            )
        found, first, back = np.unique(clients, return_index=True, return_inverse=True)
        return Cohort(
            found.astype(np.int64),
            None if inclusion is None else inclusion[first],
            np.bincount(back, times, minlength=len(found)).astype(np.int64),
            cohort.stratum[first] if cohort.stratum is not None and len(cohort.stratum) == len(clients) else None,
            cohort.strata,
            numbers=cohort.numbers,
        )

    def _clients(self, found: Any, view: View, what: str) -> Ints:
        try:
            clients = np.asarray(found)
        except Exception as error:
            problem = f"returned {_shown(found)} as clients: return an array of indices"
            raise self._refused(view, problem) from error
        if clients.ndim != 1 or (clients.size and not np.issubdtype(clients.dtype, np.integer)):
            raise self._refused(
                view, f"returned {what} of type {clients.dtype} and shape {clients.shape}: return indices, int64 (m,)"
            )
        clients = clients.astype(np.int64)
        if isinstance(view.present, int):
            away = (clients < 0) | (clients >= view.present)
        else:
            place = np.minimum(np.searchsorted(view.present, clients), max(len(view.present) - 1, 0))
            away = view.present[place] != clients if len(view.present) else np.ones(len(clients), bool)
        if away.any():
            raise self._refused(
                view, f"returned client {clients[away][0]}, who is not among view.available: draw from those"
            )
        return clients

    def _column(self, values: Any, clients: Ints, view: View, name: str) -> Floats | None:
        if values is None:
            return None
        column = np.asarray(values)
        numbers = np.issubdtype(column.dtype, np.number) and not is_complex(column)
        if column.shape != clients.shape or not numbers:
            shown = f"of {column.dtype}, shape {column.shape},"
            raise self._refused(view, f"returned {name} {shown} for {len(clients)} clients: give one number a client")
        if (lacking := ~np.isfinite(column)).any():
            place = int(np.flatnonzero(lacking)[0])
            raise self._refused(view, f"returned {name} {column[place]} for client {clients[place]}: it must be finite")
        return column.astype(np.float64)

    def _refused(self, view: View, problem: str) -> ComponentFailure:
        return refuse_result(self.part, problem, view.round)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float | np.generic) and np.asarray(number).dtype.kind in "biuf" and isfinite(number)


def _shown(found: Any) -> str:
    return "nothing" if found is None else f"a {type(found).__name__}"
