"""Local algorithm of one rank: calls its hooks, checks their results, keeps its state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.exact import LARGEST, Accumulator
from fedmpi.common.calling import calling, is_complex, refuse_result, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component
from fedmpi.config import Config
from fedmpi.config.local_algorithm import local_algorithm, names_in
from fedmpi.local.algorithm import LocalAlgorithm, Totals, Vectors, Work, misnamed, vector_like
from fedmpi.local.client_state import ClientState
from fedmpi.local.failures import check_update
from fedmpi.local.work import ClientTask, LocalRule, Observer
from fedmpi.models.flat import FlatModel

NUMBER_GRID = 2.0**40
"""Inverse of the grid of numbers in exact sums: their sum is bit-identical in any order."""

FIXED = "the server's vectors are set in server_step, by all ranks alike"
PREFIX = "algorithm."
HOOKS = {
    "correction": ("client", "server"),
    "objective": ("module", "x", "y", "client", "server"),
    "finish": ("client", "server", "work"),
    "server_step": ("server", "update", "sums", "totals"),
    "refuses": ("config",),
}
"""Methods of an algorithm and their arguments."""


class Hooks:
    """Caller of a local algorithm's hooks for the clients of this rank and, as on every rank, for the server."""

    def __init__(
        self,
        part: Component,
        algorithm: Any,
        model: FlatModel,
        population: int,
        memory: float = 0.0,
        exact: bool = False,
    ):
        self.part, self.algorithm, self.model = part, algorithm, model
        self.population, self.exact = population, exact
        self.client_state = declared(part, algorithm, "client_state", ("index", "round", "samples"))
        self.server_state = declared(part, algorithm, "server_state", ("model", "round"))
        self.sums = declared(part, algorithm, "sums")
        self.numbers = declared(part, algorithm, "numbers", self.sums)
        self.sent = self.server_state if algorithm.sent is None else declared(part, algorithm, "sent")
        if unknown := set(self.sent) - set(self.server_state):
            raise UserError(f"{part.name}: sent names {min(unknown)!r}, which server_state does not declare")
        self.proximal_mu = pull(part, algorithm)
        self.corrects = overrides(algorithm, "correction")
        self.finishes = overrides(algorithm, "finish") or bool(self.client_state)
        self.own_loss = algorithm.objective is not None
        self.steps_server = overrides(algorithm, "server_step")
        if (self.sums or self.numbers) and not overrides(algorithm, "finish"):
            raise UserError(f"{part.name} declares sums or numbers, which its finish() is to return: write one")
        for name, given in HOOKS.items():
            if overrides(algorithm, name):
                takes(part, getattr(algorithm, name), *given, method=name)
        self.state = ClientState(self.client_state, model.size, model.dtype, memory)
        self.server = {name: torch.zeros_like(model.initial) for name in self.server_state}
        self.totals: dict[str, float] = {}
        self._accumulators: Mapping[str, Accumulator] = {}
        self._round, self._start = 0, model.initial

    @property
    def alone(self) -> str | None:
        """Return why every client must do its own work, or None if clients may be merged into one gradient."""
        hooks = [
            name
            for name, own in (
                ("correction", self.corrects),
                ("finish", self.finishes),
                ("objective", self.own_loss),
            )
            if own
        ]
        return f"local.algorithm = {self.part.name!r} has its own {hooks[0]}() for each client" if hooks else None

    @property
    def description(self) -> str:
        """Describe the algorithm's work besides plain steps, for the run log."""
        does = []
        if self.corrects:
            does.append("corrects gradients")
        if self.proximal_mu:
            does.append(f"pulls with mu = {self.proximal_mu:g}")
        if self.own_loss:
            does.append("has its own loss, one client at a time")
        if self.client_state:
            kept = ", ".join(self.client_state)
            does.append(f"keeps {kept} of every client where it was trained last, of up to {self.state.room} in memory")
        if self.server_state:
            does.append(f"keeps {', '.join(self.server_state)} of the server")
        if self.sums or self.numbers:
            does.append(f"sums {', '.join((*self.sums, *self.numbers))}")
        if not does:
            does.append("plain steps")
        does.extend(
            f"has {name!r}, which nothing reads (or {meant}?)" for name, meant in misnamed(self.algorithm).items()
        )
        return f"{self.part.name}: {'; '.join(does)}"

    def begin(self, round: int, start: Tensor, accumulators: Mapping[str, Accumulator]) -> None:
        """Start a round."""
        self._round, self._start, self._accumulators = round, start, accumulators
        self.totals = dict.fromkeys(self.numbers, 0.0)
        facts = {"model": start, "round": round}
        self._seen = Vectors("server", {name: self.server[name] for name in self.sent}, facts, FIXED)

    def open(self, task: ClientTask, samples: int) -> ClientHooks:
        """Open a client's state and correction before its local steps."""
        facts = {"index": task.client, "round": self._round, "samples": samples}
        return ClientHooks(self, task, self._record(task.client), facts, self._seen)

    def add(self, client: int, returned: Any) -> None:
        """Add the vectors and numbers that `finish` returned to their sums."""
        wanted = (*self.sums, *self.numbers)
        found = {} if returned is None else returned
        if not isinstance(found, Mapping) or set(found) != set(wanted):
            found_names = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            names = ", ".join(wanted) or "no names"
            raise self.refusal(f"finish returned {found_names}, but sums and numbers declare {names}", client)
        for name in self.sums:
            try:
                vector = vector_like(self._start, found[name], f"what finish returns as {name!r}")
                if self.part.foreign and not bool(torch.isfinite(vector.sum())):
                    raise ValueError(f"what finish returns as {name!r} is not finite: lower local.lr, or mend it")
            except (TypeError, ValueError, RuntimeError) as error:
                raise self.refusal(str(error), client) from error
            self._accumulators[name].add(vector, 1.0)
        for name in self.numbers:
            number = self._number(name, found[name], client)
            self.totals[name] += float(np.rint(number * NUMBER_GRID)) / NUMBER_GRID if self.exact else number

    def _number(self, name: str, given: Any, client: int) -> float:
        """Return a number to be summed; reject it if the sum could not represent it."""
        try:
            number = math.nan if is_complex(given) else float(given)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not abs(self.totals[name]) + abs(number) < LARGEST:
            shown = type(given).__name__ if math.isnan(number) else f"{number:g}"
            problem = f"finish returned {shown} as {name!r}: return a finite number; sums hold less than 2**50"
            raise self.refusal(problem, client)
        return number

    def keep(self, client: int, vectors: dict[str, Tensor], record: Tensor) -> None:
        """Store a client's state; reuse `record`, which the client was given, if all vectors are still in it."""
        for name, vector in vectors.items():
            if not bool(torch.isfinite(vector.sum())):
                raise self.refusal(f"client.{name} is not finite: lower local.lr", client)
        rows = zip(record.unbind(0), vectors.values(), strict=True)
        if all(row.data_ptr() == own.data_ptr() and own.is_contiguous() for row, own in rows):
            self.state.put(client, record.numpy())
        else:
            self.state.write(client, vectors)

    def server_step(self, update: Tensor, sums: Mapping[str, Any], totals: Totals) -> Tensor:
        """Return the update (d,) for the server optimizer; with no selected clients, the given update.

        Float buffers keep their weighted mean whatever the algorithm returns.
        """
        if not self.steps_server or not totals.participants:
            return update
        facts, before = {"model": self._start, "round": totals.round}, dict(self.server)
        buffers = update[self.model.trainable :].clone()
        server = Vectors("server", self.server, facts)
        with torch.no_grad(), calling(self.part, totals.round):
            returned = self.algorithm.server_step(server, update, sums, totals)
            chosen = update if returned is None else vector_like(update, returned, "the update of server_step")
            if self.part.foreign and not bool(torch.isfinite(chosen).all()):
                raise ValueError(
                    "the update of server_step is not finite: lower local.lr or server.optimizer.lr, or mend it"
                )
            if len(buffers):  # an extrapolated variance may become negative
                chosen = torch.cat([chosen[: self.model.trainable], buffers])
        for name, vector in self.server.items():
            if not bool(torch.isfinite(vector.sum())):
                raise self.refusal(f"server.{name} is not finite: lower local.lr or server.optimizer.lr")
            if vector is not before[name]:
                self.server[name] = vector.clone()  # it may be the update or another vector of the server
        return chosen

    def vectors(self) -> list[Tensor]:
        """Return the server's vectors (d,), which must be identical on every rank."""
        return [*self.server.values()]

    def close(self) -> None:
        """Free the file of the clients' vectors."""
        self.state.close()

    def server_tensors(self) -> dict[str, Tensor]:
        """Return the server's vectors for a checkpoint."""
        return {f"{PREFIX}{name}": vector for name, vector in self.server.items()}

    @property
    def tensor_names(self) -> list[str]:
        """Return the names of these vectors in a checkpoint."""
        return [f"{PREFIX}{name}" for name in self.server_state]

    def load_server(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the server's vectors from a checkpoint; raise ValueError if their length differs."""
        for name in self.server_state:
            if f"{PREFIX}{name}" in tensors:
                saved = tensors[f"{PREFIX}{name}"]
                if saved.shape != self.server[name].shape:
                    raise ValueError(f"{PREFIX}{name} has {saved.numel()} values, not {self.server[name].numel()}")
                self.server[name] = saved.clone()

    def refusal(self, problem: str, client: int | None = None) -> Exception:
        """Build the failure of a hook that returned or did something invalid."""
        return refuse_result(self.part, problem, self._round, client)

    def marks(self) -> list[int]:
        """Return the version counters of the model and the server's vectors, which count writes."""
        return [self._start._version, *(self.server[name]._version for name in self.sent)]

    def _record(self, client: int) -> Tensor | None:
        """Return a client's kept vectors (vectors, d), None if none are kept.

        Built-in algorithms change them in `finish` only, after which they are stored in any case. They get the record
        itself if it is in memory. Others get a copy, so that changes of a benchmark or before a failure can be undone.
        """
        if not self.client_state:
            return None
        return self.state.copy(client) if self.part.foreign else torch.from_numpy(self.state.record(client))


class ClientHooks:
    """Hooks of one client in one round."""

    def __init__(self, hooks: Hooks, task: ClientTask, record: Tensor | None, facts: dict[str, Any], server: Vectors):
        self.hooks, self.task, self.server, self._record = hooks, task, server, record
        rows = () if record is None else record.to(hooks._start.device).unbind(0)
        self.client = Vectors("client", dict(zip(hooks.client_state, rows, strict=True)), facts)

    @cached_property
    def correction(self) -> Tensor | None:
        """Return the vector (t,) added to each gradient, t trainable values; the first read calls the hook."""
        return self._correct() if self.hooks.corrects else None

    @property
    def own_loss(self) -> bool:
        """Check whether `loss` replaces the task's loss."""
        return self.hooks.own_loss

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Guard every call of a hook."""
        hooks = self.hooks
        before = hooks.marks()
        with calling(hooks.part, hooks._round, self.task.client):
            yield
        if hooks.marks() != before:
            raise hooks.refusal(f"it changed the model or a vector of the server in place: {FIXED}", self.task.client)

    def loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the algorithm's own loss of a batch, a tensor ()."""
        algorithm = self.hooks.algorithm
        objective = algorithm.objective
        assert objective is not None
        loss = objective(module, x, y, self.client, self.server)
        if not isinstance(loss, Tensor):
            raise self.hooks.refusal(
                f"objective returned {type(loss).__name__}, not the loss as a tensor", self.task.client
            )
        return loss.mean() if loss.dim() else loss

    def finish(self, delta: Tensor, steps: int, rule: LocalRule) -> None:
        """Pass the client's update (d,) to the algorithm, which sets its state and returns the values to sum."""
        hooks = self.hooks
        if not hooks.finishes:
            return
        work = Work(delta, steps, rule.lr, self.task.coefficient, rule.proximal_mu, int(self.client.samples))
        before = delta._version
        with torch.no_grad(), self.calling():
            returned = hooks.algorithm.finish(self.client, self.server, work)
        if delta._version != before:
            raise hooks.refusal(
                "finish changed work.delta in place, but the update is sent as it was. Compute with a copy, "
                "work.delta.clone(); change the model in correction, objective or server_step",
                self.task.client,
            )
        hooks.add(self.task.client, returned)
        if self._record is not None:
            hooks.keep(self.task.client, self.client._vectors, self._record)

    def _correct(self) -> Tensor | None:
        hooks = self.hooks
        with torch.no_grad(), self.calling():
            found = hooks.algorithm.correction(self.client, self.server)
        if found is None:
            return None
        try:
            vector = vector_like(hooks._start, found, "the correction")[: hooks.model.trainable]
            if hooks.part.foreign and not bool(torch.isfinite(vector).all()):
                raise ValueError("the correction is not finite: lower local.lr or server.optimizer.lr, or mend it")
            return vector
        except (TypeError, ValueError, RuntimeError) as error:
            raise hooks.refusal(str(error), self.task.client) from error


def deliver(
    task: ClientTask,
    update: Tensor,
    rule: LocalRule,
    observe: Observer | None,
    total: Accumulator,
    hooks: ClientHooks | None = None,
    steps: int = 0,
) -> None:
    """Add coefficient · Δ, or the observer's replacement of Δ, to `total`; the client's hooks see the original Δ."""
    check_update(update, rule.lr)
    if hooks is not None:
        hooks.finish(update, steps, rule)
    replaced = observe(task.client, update) if observe is not None else None
    total.add(update if replaced is None else replaced, task.coefficient, task.client)


def make_hooks(config: Config, model: FlatModel, population: int) -> Hooks | None:
    """Build the hooks of the configured algorithm; None for plain local steps."""
    chosen = local_algorithm(config)
    if chosen is None:
        return None
    memory = config.cluster.state_memory * 2**30
    return Hooks(*chosen, model, population, memory, config.server.exact)


def overrides(algorithm: LocalAlgorithm, name: str) -> bool:
    """Check whether an algorithm overrides a hook."""
    own = getattr(algorithm, name)
    return getattr(own, "__func__", own) is not getattr(LocalAlgorithm, name)


def pull(part: Component, algorithm: LocalAlgorithm) -> float:
    """Return μ of an algorithm's own proximal pull."""
    mu: Any = algorithm.proximal_mu
    if isinstance(mu, bool) or not isinstance(mu, int | float | np.integer | np.floating) or not 0 <= mu < math.inf:
        raise UserError(
            f"{part.key} = {part.name!r} has proximal_mu = {mu!r}: the weight of the pull is a finite number, 0 or more"
        )
    return float(mu)


def declared(part: Component, algorithm: LocalAlgorithm, field: str, taken: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names that an algorithm declares in a field."""
    names = names_in(part, algorithm, field)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise UserError(f"{part.name}: {field} names {name!r}, which is no name of an attribute")
        if name in taken or names.count(name) > 1:
            raise UserError(f"{part.name}: {field} names {name!r}, which is taken: choose another name")
    return names
