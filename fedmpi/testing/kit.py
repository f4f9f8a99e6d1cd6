"""Conformance tests: the checks of a component, and their results as lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fedmpi.common.errors import ComponentFailure, UserError
from fedmpi.common.registry import KINDS, Component, describe, known_kind, resolve
from fedmpi.testing import preparation, selection, training
from fedmpi.testing.check import Check, CheckFailed, CheckSkipped, Contract, Subject
from fedmpi.testing.started import started_check

CONTRACTS: dict[str, Contract] = selection.CONTRACTS | training.CONTRACTS | preparation.CONTRACTS
"""Contracts by kind of component."""
Settings = Mapping[str, Any]


def checks(
    choice: Any, settings: Settings | None = None, kind: str | None = None, *, runs: bool = True
) -> Iterator[Check]:
    """Yield the checks of a component."""
    return _checks(_subject(choice, settings, kind), runs)


def parametrize_with_checks(choices: Iterable[Any | tuple[Any, Settings]], *, runs: bool = True) -> Any:
    """Return a pytest decorator: the test gets every `check` of every component; checks that do not apply are skipped.

    Examples
    --------
    >>> import fedmpi.testing
    >>> @fedmpi.testing.parametrize_with_checks(["uniform", ("weighted", {"clients.sampler.replace": False})])
    ... def test_samplers(check):
    ...     check()
    """
    import pytest

    subjects = [_subject(*(choice if isinstance(choice, tuple) else (choice,))) for choice in choices]

    def skipping(check: Check) -> str:
        try:
            return check()
        except CheckSkipped as reason:
            pytest.skip(str(reason))

    found = [check for subject in subjects for check in _checks(subject, runs)]
    return pytest.mark.parametrize("check", [replace(check, run=partial(skipping, check)) for check in found], ids=str)


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
            ours = isinstance(problem, CheckSkipped | CheckFailed | ComponentFailure | UserError)
            remark = str(problem) if ours else f"{type(problem).__name__}: {problem}"
        yield Result(check, outcome, " ".join(remark.split()), time.perf_counter() - started)


def part_of(choice: Any, kind: str | None = None) -> Component:
    """Return the component of a choice."""
    if isinstance(choice, Component):
        return choice
    return describe(choice) if kind is None else resolve(known_kind(kind), choice)


def _subject(choice: Any, settings: Settings | None = None, kind: str | None = None) -> Subject:
    subject = Subject(part_of(choice, kind), dict(settings or {}))
    subject.part.checked(subject.options)
    return subject


def _checks(subject: Subject, runs: bool) -> Iterator[Check]:
    yield from CONTRACTS[subject.part.kind].of(subject)
    if runs and not KINDS[subject.part.kind].key.startswith("--"):
        yield started_check(subject)
