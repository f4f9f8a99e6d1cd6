"""What a conformance check is: a part, a name, something to run; and how often right parts are accused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmpi.common.calling import naming
from fedmpi.common.generators import drawn_from, generator_states, kept_generators
from fedmpi.common.registry import KINDS, Part
from fedmpi.common.types import AnyArray
from fedmpi.config.keys import tables_by_name
from fedmpi.config.own_options import goes_to_any

FALSE_ALARM = 1e-4
"""Probability that a part that does what it states fails one of the statistical checks, over all its clients."""


class CheckFailed(AssertionError):
    """A part does not keep to its contract: what it did, and what is wanted."""


class CheckSkipped(Exception):
    """A check that means nothing here, and why."""


@dataclass(frozen=True)
class Check:
    """One statement about a part."""

    part: Part
    name: str  # What is stated, in a few words
    run: Callable[[], str]  # run() tests it and returns a remark on what was seen

    def __call__(self) -> str:
        """Test the statement."""
        return self.run()

    def __str__(self) -> str:
        return f"{self.part.name}: {self.name}"


@dataclass(frozen=True)
class Subject:
    """A part under test and the configuration it is tried in."""

    part: Part
    # Keys of the configuration, `{"participation.keep": 0.3}`: the part's options and what else its runs need
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the settings that are options of the part."""
        table = KINDS[self.part.kind].table
        prefix = f"{table}." if table else ""
        named = {key.removeprefix(prefix): value for key, value in self.settings.items() if key.startswith(prefix)}
        return {name: value for name, value in named.items() if self.part.option(name) or self._goes_to_any(name)}

    def _goes_to_any(self, name: str) -> bool:
        fields = tables_by_name().get(KINDS[self.part.kind].table)
        if fields is None:
            return self.part.takes_any
        return goes_to_any(KINDS[self.part.kind].table, name, fields, self.part, [self.part])

    @property
    def choice(self) -> Any:
        """The part as a configuration chooses it: a built-in name, or the object."""
        return self.part.object if self.part.foreign else self.part.name

    def mark(self, name: str, default: Any = None) -> Any:
        """What the part's decorator says under this name, as `needs` and `measures`."""
        return self.part.marks.get(name, default)

    def made(self) -> Any:
        """The part, freshly made with its options."""
        return self.part.make(self.options)

    def check(self, name: str, run: Callable[[Subject], str]) -> Check:
        """A check of this subject."""

        def named() -> str:
            with naming(self.part, but=(CheckFailed, CheckSkipped)):
                return run(self)

        return Check(self.part, name, named)


def demand(holds: bool, problem: str) -> None:
    """Fail the check with this problem unless it holds."""
    if not holds:
        raise CheckFailed(problem)


def leaves_generators_alone(exercise: Callable[[], object]) -> str:
    """Run something; global generators of random, numpy and torch must be as before."""
    with kept_generators():
        before = generator_states()
        exercise()
        drawn = drawn_from(before)
    given = "the generator that the part is given (view.generator, client.generator), or one of your own with a seed"
    demand(not drawn, f"it draws from, or seeds, the global generator of {' and '.join(drawn)}: use {given}")
    return "random, numpy and torch as before"


def same_twice(exercise: Callable[[], list[AnyArray]]) -> str:
    """Do something twice, each time with a part made afresh and the same generators: the results must be the same."""
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
