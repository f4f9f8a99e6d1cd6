"""Conformance checks: the contract of a kind of component is a row of a table, and its checks follow from the row."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from fedmpi.common.calling import kept_generators, seed_generators
from fedmpi.common.errors import ClientFailure, ComponentFailure, UserError
from fedmpi.common.registry import KINDS, Component
from fedmpi.common.types import AnyArray

FALSE_ALARM = 1e-4
"""Probability that a correct component fails one of the statistical checks, over all its clients."""
TOLERANCE = 1e-4
"""Largest relative difference of results that a component computes in another order."""
DIFFERENT = (
    "the same input and the same generator gave two different results. They must not depend on the time, the process, "
    "or a global generator. Draw from the generator that it is given (view.generator)"
)
CLIENTS = 100_000
SECONDS, BYTES = 10.0, 1 << 29
"""CPU seconds and memory of one round with CLIENTS clients that are too many."""


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
class Result:
    """Result of a check."""

    check: Check
    outcome: Literal["ok", "FAILED", "skipped"]
    remark: str  # observation, or the problem
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:7}  {self.check.name}: {self.remark}  ({self.seconds:.1f} s)"


def perform(checks: Iterable[Check]) -> Iterator[Result]:
    """Run the checks sequentially; an exception of a component is a failed check."""
    for check in checks:
        started = time.perf_counter()
        outcome: Literal["ok", "FAILED", "skipped"] = "ok"
        try:
            remark = check()
        except Exception as problem:
            outcome = "skipped" if isinstance(problem, CheckSkipped) else "FAILED"
            ours = isinstance(problem, CheckSkipped | CheckFailed | ComponentFailure | ClientFailure | UserError)
            remark = str(problem) if ours else f"{type(problem).__name__}: {problem}"
        yield Result(check, outcome, " ".join(remark.split()), time.perf_counter() - started)


@dataclass(frozen=True, eq=False)
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
            return {name: value for name, value in self.settings.items() if name in self.part.fields}
        own = {name: value for name, value in self.settings.items() if name.startswith(f"{key}.")}
        return {name.removeprefix(f"{key}."): value for name, value in own.items()}

    def made(self) -> Any:
        """Return a new instance of the component with its options."""
        return self.part.make(self.options)


Results = dict[str, AnyArray]
"""Arrays and numbers by name that come from the use of a component."""


class OtherUse(NamedTuple):
    """Another use of a component that must give equal results."""

    name: str
    way: dict[str, Any]  # keyword arguments of `play`
    problem: str  # what to do if results differ


@dataclass(frozen=True)
class Contract:
    """Row of the table of contracts: requirements for the components of a kind."""

    # Uses the component as runs do, which reject invalid results; returns the results
    play: Callable[..., Results]
    other: OtherUse | None = None
    more: tuple[tuple[str, Callable[[Subject], str]], ...] = ()

    def of(self, subject: Subject) -> Iterator[Check]:
        """Yield the checks of a component."""
        first = cache(partial(self.play, subject))

        def valid() -> str:
            for name, values in first().items():
                finite = not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all()
                demand(finite, f"its results are not finite for finite inputs: {name}")
            return f"{len(first())} results"

        def again() -> str:
            whole = _for_comparison(first)
            with kept_generators():
                seed_generators(99)
                second = self.play(subject)
            demand_equal(whole, second, DIFFERENT)
            return f"{len(whole)} results, equal both times"

        def otherwise(other: OtherUse) -> str:
            whole = _for_comparison(first)
            return f"equal within {demand_equal(whole, self.play(subject, **other.way), other.problem, TOLERANCE):.1g}"

        def further(run: Callable[[Subject], str]) -> str:
            _for_comparison(first)
            return run(subject)

        yield Check(subject.part, "valid results", valid)
        yield Check(subject.part, "same results again", again)
        if self.other is not None:
            yield Check(subject.part, self.other.name, partial(otherwise, self.other))
        for name, run in self.more:
            yield Check(subject.part, name, partial(further, run))


def _for_comparison(play: Callable[[], Results]) -> Results:
    """Return results; a component that fails has its own check."""
    try:
        return play()
    except Exception as problem:
        raise CheckSkipped(f"it has no valid results ({problem})") from None


def demand(holds: Any, problem: str) -> None:
    """Fail the check with this problem unless it holds."""
    if not holds:
        raise CheckFailed(problem)


def demand_equal(one: Results, other: Results, problem: str, tolerance: float = 0.0) -> float:
    """Require equal results, floats up to a difference relative to their norm; return the largest difference."""
    demand(one.keys() == other.keys(), f"{len(other)} results instead of {len(one)}: {problem}")
    worst = 0.0
    for name, expected in one.items():
        found = other[name]
        if np.issubdtype(expected.dtype, np.floating) and found.shape == expected.shape:
            apart = float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))
            equal = np.array_equal(found, expected, equal_nan=True) or apart <= tolerance
        else:
            apart, equal = 0.0, np.array_equal(found, expected)
        shown = f"{found} instead of {expected}" if expected.ndim == 0 else f"different (by {apart:.2g} of its norm)"
        demand(equal, f"{name} is {shown}: {problem}")
        worst = max(worst, 0.0 if np.isnan(apart) else apart)
    return worst


def cost(prepare: Callable[[int], Any], use: Callable[[Any], object], things: str = "clients") -> str:
    """Use a component on 10,000 and on 100,000 clients; stop if already the first cost too much for their number.

    A component may reject so many clients.
    """
    for count in (CLIENTS // 10, CLIENTS):
        world = prepare(count)
        tracemalloc.start()
        started = time.process_time()
        try:
            use(world)
            seconds, memory = time.process_time() - started, tracemalloc.get_traced_memory()[1]
        except UserError as limit:
            return f"rejects {count:,} {things}: {limit}"
        finally:
            tracemalloc.stop()
        seen = f"{seconds:.2g} s and {memory / 2**20:.2g} MiB per round with {count:,} {things}"
        share = count / CLIENTS
        demand(seconds <= SECONDS * share and memory <= BYTES * share, f"it takes {seen}. Use arrays")
    return seen
