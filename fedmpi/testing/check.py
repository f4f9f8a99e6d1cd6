"""Conformance checks: a component, a name and a function to run; the false-alarm rate of statistical checks."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmpi.common.calling import naming
from fedmpi.common.generators import drawn_from, generator_states, kept_generators
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
    """Failure of a component to satisfy its interface, with its behaviour and the required one."""


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
        prefix = "" if key.startswith("--") else f"{key}."
        return {name.removeprefix(prefix): value for name, value in self.settings.items() if name.startswith(prefix)}

    @property
    def choice(self) -> Any:
        """Return the component as a configuration chooses it: a built-in name, or the object."""
        return self.part.object if self.part.foreign else self.part.name

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


@dataclass(frozen=True)
class Contract:
    """Requirements for every component of a kind, besides the checks that start runs."""

    # A few uses of the component, without the protection of generators in runs; returns its results
    exercise: Callable[[Subject], list[AnyArray]]
    same: str  # name of the check that two exercises have the same results
    checks: tuple[tuple[str, Callable[[Subject], str]], ...]
    bare: Callable[[Subject], object] | None = None  # function that must not change global generators, else `exercise`

    def of(self, subject: Subject) -> Iterator[Check]:
        """Yield the checks of a component."""
        bare = self.bare or self.exercise
        yield subject.check("global generators untouched", lambda s: _leaves_generators_alone(lambda: bare(s)))
        yield subject.check(self.same, lambda s: _same_twice(lambda: self.exercise(s)))
        for name, run in self.checks:
            yield subject.check(name, run)


def demand(holds: bool, problem: str) -> None:
    """Fail the check with this problem unless it holds."""
    if not holds:
        raise CheckFailed(problem)


def _leaves_generators_alone(exercise: Callable[[], object]) -> str:
    with kept_generators():
        before = generator_states()
        exercise()
        drawn = drawn_from(before)
    given = "the generator that the component is given (view.generator, client.generator), or an own one with a seed"
    demand(not drawn, f"it draws from, or seeds, the global generator of {' and '.join(drawn)}: use {given}")
    return "random, numpy and torch as before"


def _same_twice(exercise: Callable[[], list[AnyArray]]) -> str:
    """Exercise two instances with the same generators and compare the results."""
    with kept_generators():
        first, second = exercise(), exercise()
    same = len(first) == len(second) and all(map(_same_values, first, second))
    demand(
        same,
        "the same input and the same generator gave two different results: what it returns must follow from what it "
        "is given, not from the time, the process, or a generator without a fixed seed",
    )
    return f"{len(first)} results, equal both times"


def _same_values(one: AnyArray, other: AnyArray) -> bool:
    return np.array_equal(one, other, equal_nan=np.issubdtype(np.asarray(one).dtype, np.floating))


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
                expected <= limit, f"a round takes {seen}, ten times more {things} {growth:.3g} times that: use arrays"
            )
    return f"{spent[0]:.2g} s, {spent[1] / 2**20:.2g} MiB a round with {CLIENTS:,} {things}"


def _measured(use: Callable[[Any], object], world: Any) -> tuple[float, int]:
    """Return CPU seconds and the peak memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        use(world)
        return time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
