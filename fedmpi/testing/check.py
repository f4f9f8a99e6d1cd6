"""Conformance checks: the contract of a kind of component is a row of a table, and its checks follow from the row."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedmpi.common.calling import kept_generators, naming
from fedmpi.common.registry import KINDS, Component
from fedmpi.common.types import AnyArray

FALSE_ALARM = 1e-4
"""Probability that a correct component fails one of the statistical checks, over all its clients."""
CLIENTS = 100_000
SECONDS, BYTES = 10.0, 1 << 30
"""CPU seconds and memory of one round with CLIENTS clients that are too many."""
LITTLE = (0.01, 1 << 20)
"""Seconds and bytes below which growth is not assessed."""


class CheckFailed(AssertionError):
    """Failure of a component to satisfy its interface, with its behavior and the required one."""


class CheckSkipped(Exception):
    """Check that does not apply, with the reason."""


@dataclass(frozen=True)
class Check:
    """One statement about a component."""

    part: Component
    name: str  # short form of the statement
    run: Callable[[], str]  # function that tests it and returns a remark on the result

    def __call__(self) -> str:
        """Test the statement."""
        return self.run()

    def __str__(self) -> str:
        return f"{self.part.name}: {self.name}"


@dataclass(frozen=True)
class Subject:
    """Component under test, with the configuration of its trials."""

    part: Component
    # Keys of the configuration, `{"clients.sampler.keep": 0.3}`: the component's options and further needs of its runs
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings that are options of the component."""
        key = KINDS[self.part.kind].key
        if key.startswith("--"):  # settings of its trials are beside its options
            return {name: value for name, value in self.settings.items() if name in self.part.options}
        own = {name: value for name, value in self.settings.items() if name.startswith(f"{key}.")}
        return {name.removeprefix(f"{key}."): value for name, value in own.items()}

    @property
    def unguarded(self) -> Subject:
        """Return the same component without the protection that custom components have in runs."""
        return replace(self, part=replace(self.part, name=self.part.name.replace(":", ".")))

    def mark(self, name: str, default: Any = None) -> Any:
        """Return an argument of the component's decorator, such as `needs` and `measures`."""
        return self.part.marks.get(name, default)

    def made(self) -> Any:
        """Return a new instance of the component with its options."""
        return self.part.make(self.options)

    def check(self, name: str, run: Callable[[Subject], str]) -> Check:
        """Return a check of this subject."""

        def named() -> str:
            with naming(self.part, but=(CheckFailed, CheckSkipped)):
                return run(self)

        return Check(self.part, name, named)


class Alike(NamedTuple):
    """Other ways to use a component that must give equal results."""

    name: str
    ways: tuple[dict[str, Any], ...]  # keyword arguments of `play`
    problem: str  # what is wrong if results differ, and what to do
    tolerance: float = 0.0  # largest difference, relative to the largest result


@dataclass(frozen=True)
class Contract:
    """Row of the table of contracts: requirements for the components of a kind, besides the checks that start runs."""

    # Uses the component as runs do, which rejects invalid results; returns the results
    play: Callable[..., list[AnyArray]]
    valid: str  # name of the check of validity
    same: str  # name of the check that a second use gives equal results
    alike: tuple[Alike, ...] = ()
    more: tuple[tuple[str, Callable[[Subject], str]], ...] = ()

    def of(self, subject: Subject) -> Iterator[Check]:
        """Yield the checks of a component."""
        yield subject.check(self.valid, self._valid)
        yield subject.check(self.same, self._same_twice)
        for one in self.alike:
            yield subject.check(one.name, partial(self._same_otherwise, one))
        for name, run in self.more:
            yield subject.check(name, partial(self._further, run))

    def _valid(self, subject: Subject) -> str:
        found = self.play(subject)
        numbers = [one for one in found if np.issubdtype(one.dtype, np.floating)]
        demand(all(np.isfinite(one).all() for one in numbers), "its results are not finite for finite inputs")
        known = np.concatenate([np.ravel(one) for one in numbers or found] or [np.zeros(1)])
        return f"{len(found)} results from {known.min(initial=0):.3g} to {known.max(initial=0):.3g}"

    def _results(self, subject: Subject, **way: Any) -> list[AnyArray]:
        """Return results for a comparison; a component that fails has its own check."""
        try:
            return self.play(subject, **way)
        except CheckSkipped:
            raise
        except Exception as problem:
            raise CheckSkipped(f"it has no valid results ({problem})") from None

    def _same_twice(self, subject: Subject) -> str:
        with kept_generators():
            first, second = self._results(subject.unguarded), self._results(subject.unguarded)
        demand(
            difference(first, second) == 0,
            "the same input and the same generator gave two different results. They must not depend on the time, the "
            "process, or a global generator. Draw from the generator that it is given (view.generator)",
        )
        return f"{len(first)} results, equal both times"

    def _further(self, run: Callable[[Subject], str], subject: Subject) -> str:
        self._results(subject)
        return run(subject)

    def _same_otherwise(self, one: Alike, subject: Subject) -> str:
        whole, worst = self._results(subject), 0.0
        for way in one.ways:
            worst = max(worst, difference(whole, self.play(subject, **way)))
            shown = ", ".join(f"{name} {value}" for name, value in way.items())
            demand(worst <= one.tolerance, f"other results with {shown}, by {worst:.2g} of the largest: {one.problem}")
        return f"{len(one.ways)} other use{'s' * (len(one.ways) > 1)}, equal within {worst:.1g}"


def demand(holds: bool, problem: str) -> None:
    """Fail the check with this problem unless it holds."""
    if not holds:
        raise CheckFailed(problem)


def difference(one: list[AnyArray], other: list[AnyArray]) -> float:
    """Return the largest difference of results, relative to the largest of them; infinite for other shapes."""
    if [array.shape for array in one] != [array.shape for array in other]:
        return np.inf
    worst = 0.0
    for left, right in zip(one, other, strict=True):
        if not np.array_equal(left, right, equal_nan=np.issubdtype(left.dtype, np.floating)):
            apart = np.abs(left.astype(np.float64) - right).max()
            worst = max(worst, float(apart / max(np.abs(left).max(), 1e-30))) if np.isfinite(apart) else np.inf
    return worst


def cost(prepare: Callable[[int], Any], use: Callable[[Any], object], things: str = "clients") -> str:
    """Use a component on 1,000, 10,000 and 100,000 clients; stop if ten times more would cost too much."""
    before, spent = LITTLE, LITTLE
    for clients in (CLIENTS // 100, CLIENTS // 10, CLIENTS):
        before, spent = spent, _measured(use, prepare(clients))
        seen = f"{spent[0]:.3g} s and {spent[1] / 2**20:.3g} MiB with {clients:,} {things}"
        for now, then, little, limit in zip(spent, before, LITTLE, (SECONDS, BYTES), strict=True):
            growth = max(10.0, now / max(then, little)) if clients > CLIENTS // 100 else 10.0
            expected = now * (growth if clients < CLIENTS else 1.0)
            demand(
                expected <= limit,
                f"a round takes {seen}, and ten times more {things} take {growth:.3g} times that. Use arrays",
            )
    return f"{spent[0]:.2g} s, {spent[1] / 2**20:.2g} MiB per round with {CLIENTS:,} {things}"


def _measured(use: Callable[[Any], object], world: Any) -> tuple[float, int]:
    """Return CPU seconds and the peak memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        use(world)
        return time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
