"""Checks of what surrounds the training: who is there, who shares a mediator, whose data it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedmpi.clients.turnout import chances
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Bytes, Floats, Ints
from fedmpi.data.opening import open_store
from fedmpi.data.statistics import target_distribution
from fedmpi.mediators.groups import checked_mediators
from fedmpi.testing.check import Check, Subject, demand, leaves_generators_alone, same_twice
from fedmpi.testing.cost import cost
from fedmpi.testing.samplers import world

ROUNDS = 5
MOST = 3
"""Clients of one mediator."""
SIZES = (1, 7, 9)
"""Participants of the rounds in which they are grouped."""


def availability_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a law of availability but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: answers(s)))
    yield subject.check("same probabilities in the same round", lambda s: same_twice(lambda: answers(s)))
    yield subject.check("a probability for each client", lambda s: _range(np.concatenate(present(s))))
    yield subject.check("state survives a checkpoint", rounds_alone)
    yield subject.check(
        "cost with 100,000 clients", lambda s: cost(world, lambda view: chances(s.part, s.made(), view))
    )


def answers(subject: Subject) -> list[AnyArray]:
    """What the law says of some rounds, without the care that runs take of generators."""
    made = subject.made()
    return [np.asarray(made(world(round=t, away=False))) for t in range(ROUNDS)]


def present(subject: Subject, rounds: range = range(ROUNDS)) -> list[Floats]:
    """Each round's probabilities (N,), refused where they are none."""
    made = subject.made()
    return [chances(subject.part, made, world(round=t, away=False)) for t in rounds]


def rounds_alone(subject: Subject) -> str:
    """A law made anew in a later round must say what one says that has been there from the start."""
    first, later = present(subject)[-1], present(subject, range(ROUNDS - 1, ROUNDS))[-1]
    demand(
        np.array_equal(first, later),
        f"made anew before round {ROUNDS - 1}, as after a resume, it gives other probabilities: let them follow from "
        "the view alone",
    )
    return f"round {ROUNDS - 1} is the same without the rounds before"


def _range(found: Floats) -> str:
    return f"from {found.min():.3g} to {found.max():.3g}"


def scheduling_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a rule that groups clients but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: grouped(s)))
    yield subject.check("same groups from the same generator", lambda s: same_twice(lambda: grouped(s)))
    yield subject.check("a mediator for each client, none too large", _groups)


def grouped(subject: Subject) -> list[Ints]:
    """The mediators of some rounds' participants, refused where they are none."""
    made, found = subject.made(), []
    for t, participants in enumerate(SIZES):
        counts = (np.arange(participants)[:, None] * 3 + np.arange(5) * 2) % 7 + (np.arange(5) == 0)
        before, generator = counts.copy(), Streams(11).generator(Purpose.SCHEDULE, t)
        mediators = made(counts, MOST, generator, target_distribution(5, None))
        demand(np.array_equal(counts, before), "it changes the class counts that it is given: copy them first")
        found.append(checked_mediators(subject.part, mediators, participants, MOST, t))
    return found


def _groups(subject: Subject) -> str:
    return ", ".join(f"{n} clients in {int(m.max()) + 1}" for n, m in zip(SIZES, grouped(subject), strict=True))


def data_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a source of data but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: _digest(s)))
    yield subject.check("same data every time", lambda s: same_twice(lambda: [_digest(s)]))


def _digest(subject: Subject) -> Bytes:
    store = open_store(subject.choice, subject.options)
    return np.frombuffer(bytes.fromhex(store.manifest.train[0].sha256), np.uint8)
