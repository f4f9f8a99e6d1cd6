"""Conformance tests: does a custom component satisfy its interface?

From the command line `fedmpi check mine:loudest`; under pytest::

    import fedmpi.testing
    from mine import loudest, rare_first

    @fedmpi.testing.parametrize_with_checks([loudest, rare_first])
    def test_my_parts(check):
        check()

Every check is one statement. Each statistical check rejects a correct component with a probability of at most 10⁻⁴.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedmpi.common.registry import Component, describe, known_kind, resolve
from fedmpi.testing import preparation, selection
from fedmpi.testing.check import FALSE_ALARM, Check, CheckFailed, CheckSkipped, Contract, Result, Subject, perform
from fedmpi.testing.runs import CONTRACTS as IN_RUNS
from fedmpi.testing.runs import continued

__all__ = [
    "FALSE_ALARM",
    "Check",
    "CheckFailed",
    "CheckSkipped",
    "Result",
    "checks",
    "parametrize_with_checks",
    "perform",
]

CONTRACTS: dict[str, Contract] = selection.CONTRACTS | IN_RUNS | preparation.CONTRACTS
"""Contracts by kind of component."""
CONTINUED = "same results if continued on 2 and 3 ranks"
Settings = Mapping[str, Any]


def checks(
    choice: Any, settings: Settings | None = None, kind: str | None = None, *, runs: bool = True
) -> Iterator[Check]:
    """Yield the checks of a component.

    Parameters
    ----------
    choice : object, str or Component
        The function or class, its name, or the component.
    settings : mapping, optional
        Keys of the configuration: its options, `{"clients.sampler.keep": 0.3}`, and what else its runs need.
    kind : str, optional
        Its kind, unless its decorator or name says that.
    runs : bool
        False leaves out the run that continues on 2 and 3 ranks.
    """
    if isinstance(choice, Component):
        part = choice
    else:
        part = describe(choice) if kind is None else resolve(known_kind(kind), choice)
    subject = Subject(part, dict(settings or {}))
    part.checked(subject.options)
    yield from CONTRACTS[part.kind].of(subject)
    if runs and not part.key.startswith("--"):
        yield Check(part, CONTINUED, partial(continued, subject))


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

    def skipping(check: Check) -> str:
        try:
            return check()
        except CheckSkipped as reason:
            pytest.skip(str(reason))

    pairs = [choice if isinstance(choice, tuple) else (choice, None) for choice in choices]
    found = [check for pair in pairs for check in checks(*pair, runs=runs)]
    return pytest.mark.parametrize("check", [replace(check, run=partial(skipping, check)) for check in found], ids=str)
