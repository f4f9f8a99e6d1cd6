"""Checks of parts that keep vectors between rounds: local algorithms and server optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.server_optimizers import state_names
from fedmpi.common.types import AnyArray
from fedmpi.local.algorithm import LocalAlgorithm, Totals, Vectors, Work, misnamed
from fedmpi.local.hooks import declared, pull
from fedmpi.testing.check import Check, Subject, demand, leaves_generators_alone, same_twice

VALUES, POPULATION, ROUNDS, SAVED = 12, 6, 6, 3
"""d, N, rounds played, and the round before which the state is saved."""


def algorithm_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a local algorithm but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: exercise(s)))
    yield subject.check("same result from the same work", lambda s: same_twice(lambda: exercise(s)))
    yield subject.check("names and shapes as declared", _as_declared)
    yield subject.check("state survives a checkpoint", lambda s: _survives(lambda cut: exercise(s, cut)))


def _as_declared(subject: Subject) -> str:
    for name, meant in misnamed(subject.made()).items():
        own = "let what is its own begin with an underscore"
        demand(False, f"has {name!r}, which nothing reads: did you mean {meant!r}? If not, {own}")
    return f"{len(exercise(subject))} updates of ({VALUES},)"


def exercise(subject: Subject, saved: int | None = None) -> list[AnyArray]:
    """Play rounds of two or three clients with made-up gradients; the updates (d,) that the server's optimizer gets."""
    made: LocalAlgorithm = subject.made()
    kinds = ("client_state", "server_state", "sums", "numbers")
    names = {kind: declared(subject.part, made, kind) for kind in kinds}
    clients = {k: _zeros(names["client_state"]) for k in range(POPULATION)}
    server, w, found = _zeros(names["server_state"]), torch.full((VALUES,), 0.1), []
    for t in range(ROUNDS):
        if t == saved:
            made = subject.made()
        total, sums = torch.zeros(VALUES), dict.fromkeys((*names["sums"], *names["numbers"]), 0.0)
        participants = sorted({t % POPULATION, (t * 2 + 1) % POPULATION, (t + 3) % POPULATION})  # two or three
        count = len(participants)
        for k in participants:
            facts = {"index": k, "round": t, "samples": 10 + k}
            client = Vectors("client", clients[k], facts)
            seen = Vectors("server", server, {"model": w, "round": t}, "only in server_step")
            delta = _steps(w, k, _vector(made.correction(client, seen), "correction"), pull(subject.part, made))
            returned = made.finish(client, seen, Work(delta.clone(), 3, 0.1, 1.0, pull(subject.part, made), 10 + k))
            _take(returned, sums, names)
            total += delta / count
        totals = Totals(POPULATION, count, float(count), float(count), t, 0.1)
        given = Vectors("server", server, {"model": w, "round": t})
        update = _vector(made.server_step(given, total.clone(), sums, totals), "server_step")
        update = total if update is None else update
        w = w + update
        found.append(update.numpy().copy())
    return found


def _zeros(names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(VALUES) for name in names}


def _steps(w: Tensor, k: int, correction: Tensor | None, mu: float) -> Tensor:
    """Three steps of a client whose loss is a parabola of its own."""
    curvature, centre = 0.5 + torch.arange(VALUES) / VALUES, torch.full((VALUES,), float(k - 2))
    own = w.clone()
    for _ in range(3):
        gradient = curvature * (own - centre) + mu * (own - w)
        own = own - 0.1 * (gradient if correction is None else gradient + correction)
    return own - w


def _vector(value: Any, name: str) -> Tensor | None:
    if value is None:
        return None
    demand(isinstance(value, Tensor), f"{name} returned {type(value).__name__}: return a tensor (d,), or None")
    demand(value.shape == (VALUES,), f"{name} returned {tuple(value.shape)} for a model of {VALUES} values")
    demand(bool(value.isfinite().all()), f"{name} returned values that are not finite")
    vector: Tensor = value.detach()
    return vector


def _take(returned: Mapping[str, Any] | None, sums: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> None:
    found = {} if returned is None else returned
    demand(
        isinstance(found, Mapping) and set(found) == set(sums),
        f"finish returned {sorted(found) if isinstance(found, Mapping) else type(found).__name__}, but sums and "
        f"numbers declare {sorted(sums)}",
    )
    for name in names["sums"]:
        sums[name] = sums[name] + _vector(found[name], f"finish, as {name!r},")
    for name in names["numbers"]:
        sums[name] += float(found[name])


def server_optimizer_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a server optimizer but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: descend(s)))
    yield subject.check("same step from the same update", lambda s: same_twice(lambda: descend(s)))
    yield subject.check("finite models of the same shape", lambda s: f"{len(descend(s))} steps of ({VALUES},)")
    yield subject.check("state survives a checkpoint", lambda s: _survives(lambda cut: descend(s, cut)))


def descend(subject: Subject, saved: int | None = None) -> list[AnyArray]:
    """The models (d,) after each of some made-up updates; before round `saved` the optimizer is made anew with what
    it names in `state`."""
    made, w, found = subject.made(), torch.full((VALUES,), 0.1), []
    _begin(made, w)
    for t in range(ROUNDS):
        if t == saved:
            held = {name: getattr(made, name) for name in state_names(made)}
            made = subject.made()
            _begin(made, w)
            for name, value in held.items():
                setattr(made, name, value)
        update = torch.cos(torch.arange(VALUES) * (t + 1.0)) / (t + 2)
        before = w.clone()
        returned = (made.step if hasattr(made, "step") else made)(w, update)
        w = _vector(w if returned is None else returned, "step")  # type: ignore[assignment]
        demand(not torch.equal(w, before), "an update that is not 0 left the model as it was")
        found.append(w.numpy().copy())
    return found


def _begin(made: Any, w: Tensor) -> None:
    if hasattr(made, "start"):
        made.start(w)
    for name in state_names(made):
        if not hasattr(made, name):
            setattr(made, name, torch.zeros_like(w))


def _survives(play: Callable[[int | None], list[AnyArray]]) -> str:
    """Rounds in one go, and once more made anew in the middle with what is declared alone: the same must come out."""
    whole, resumed = play(None), play(SAVED)
    for t, (one, other) in enumerate(zip(whole, resumed, strict=True)):
        demand(
            np.array_equal(one, other),
            f"made anew before round {SAVED} with the vectors that it declares, it does something else in round {t}: "
            "it remembers what no checkpoint holds. Declare it (client_state, server_state; state of an optimizer)",
        )
    return f"made anew before round {SAVED} of {len(whole)}: the same updates"
