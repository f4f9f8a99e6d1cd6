"""Local algorithm of one rank: calls its hooks, checks their results, keeps its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.exact import Accumulator
from fedmpi.aggregation.weights import LARGEST
from fedmpi.common.calling import calling, is_complex, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import Config
from fedmpi.config.tables import local_algorithm, names_in
from fedmpi.local.algorithms import LocalAlgorithm, Totals, Vectors, Work, misnamed, vector_like
from fedmpi.local.client_state import ClientState
from fedmpi.local.optimizers import is_plain_sgd
from fedmpi.local.work import ClientTask, LocalRule, Observer, RoundJob
from fedmpi.models.flat import FlatModel

NUMBER_GRID = 2.0**40
"""Inverse of the grid of numbers in exact sums: their sum is bit-identical in any order."""

FIXED = "the server's vectors are set in server_step, by all ranks alike"
PREFIX = "algorithm."
HOOKS = {
    "start": ("module", "layout", "generator"),
    "correction": ("client", "server", "generator"),
    "objective": ("module", "x", "y", "client", "server", "generator"),
    "train": ("client", "server", "steps", "generator"),
    "personal_model": ("client", "server", "steps"),
    "finish": ("client", "server", "work", "generator"),
    "server_step": ("server", "update", "sums", "totals", "generator"),
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
        streams: Streams,
        population: int,
        memory: float = 0.0,
        exact: bool = False,
    ):
        self.part, self.algorithm, self.model = part, algorithm, model
        self.streams, self.population, self.exact = streams, population, exact
        self.client_state = declared(part, algorithm, "client_state", ("index", "round", "samples", "personal"))
        self.server_state = declared(part, algorithm, "server_state", ("model", "round"))
        self.sums = declared(part, algorithm, "sums")
        self.returned = declared(part, algorithm, "numbers", self.sums)
        of_copies = (f"copy {copy} {what}" for copy in range(model.copies) for what in ("weight", "clients"))
        self.numbers = (*self.returned, *of_copies)
        """Names of the numbers summed: those that `finish` returns, and for each copy of the model its own."""
        self.sent = self.server_state if algorithm.sent is None else declared(part, algorithm, "sent")
        if unknown := set(self.sent) - set(self.server_state):
            raise UserError(f"{part.name}: sent names {min(unknown)!r}. Declare it in server_state")
        self.proximal_mu = algorithm.proximal_mu
        if not isinstance(self.proximal_mu, int | float) or not 0 <= self.proximal_mu < math.inf:
            problem = f"has proximal_mu = {self.proximal_mu!r}: the weight of the pull is a finite number, 0 or more"
            raise UserError(f"{part.key} = {part.name!r} {problem}")
        self.corrects = overrides(algorithm, "correction")
        self.kept = dict.fromkeys(self.client_state, model.size)
        """Lengths of the vectors of a client's record."""
        if model.personal:
            self.kept["personal"] = model.personal
        self.trains = algorithm.train is not None
        self.personalizes = model.personal > 0 or model.copies > 0 or algorithm.personal_model is not None
        self.finishes = overrides(algorithm, "finish") or bool(self.kept) or model.copies > 0
        self.own_loss = algorithm.objective is not None
        self.steps_server = overrides(algorithm, "server_step")
        if (self.sums or self.returned) and not overrides(algorithm, "finish"):
            raise UserError(f"{part.name} declares sums or numbers, but has no finish() to return them. Define it")
        for name, given in HOOKS.items():
            if overrides(algorithm, name):
                takes(part, getattr(algorithm, name), *given, method=name)
        self.state = self._state(memory)
        self.server = {name: torch.zeros_like(model.initial) for name in self.server_state}
        self.totals: dict[str, float] = {}
        self._accumulators: Mapping[str, Accumulator] = {}
        self._round, self._start = 0, model.initial
        self._kept: list[tuple[int, str, Tensor]] = []
        algorithm.task_loss, algorithm.least_batch = model.loss.mean, model.least
        if overrides(algorithm, "start"):
            with calling(part):
                algorithm.start(model.copy(model.initial), model.layout, streams.generator(Purpose.ALGORITHM_START))

    def _state(self, memory: float) -> ClientState:
        """Return the store of the clients' records: one row per vector, or one row of all if they differ in length."""
        model, names, zeros = self.model, self.client_state, torch.zeros_like(self.model.initial)
        copied = declared(self.part, self.algorithm, "from_initial")
        rows = [model.initial if name in copied else zeros for name in names]
        if model.personal:
            joined = torch.cat([*rows, model.personal_of(model.whole)])
            return ClientState((", ".join(self.kept),), len(joined), model.dtype, memory, model.device, joined)
        initial = torch.stack(rows) if copied else None
        return ClientState(names, model.size, model.dtype, memory, model.device, initial)

    @property
    def alone(self) -> str | None:
        """Return why every client must do its own work, or None if clients may be merged into one gradient."""
        own = {"train": self.trains, "correction": self.corrects, "finish": self.finishes, "objective": self.own_loss}
        hook = next((name for name, there in own.items() if there), None)
        if self.model.personal:
            return "local.personal: each client has its own values"
        if self.model.copies:
            return "model.copies: each client trains the copy that it chooses"
        return hook and f"local.algorithm = {self.part.name!r} has its own {hook}() for each client"

    @property
    def description(self) -> str:
        """Describe the algorithm's state for the run log, and attributes that are probably misspelled."""
        kept = [f"state of up to {self.state.room} clients in memory"] if self.kept else []
        odd = [f"has {name!r}, which nothing reads (or {meant}?)" for name, meant in misnamed(self.algorithm).items()]
        return "; ".join((self.part.name, *kept, *odd))

    def begin(self, round: int, start: Tensor, accumulators: Mapping[str, Accumulator]) -> None:
        """Start a round."""
        self._round, self._start, self._accumulators = round, start, accumulators
        self.totals = dict.fromkeys(self.numbers, 0.0)
        facts = {"model": start, "round": round}
        self._seen = Vectors("server", {name: self.server[name] for name in self.sent}, facts, FIXED)

    def open(self, task: ClientTask, samples: int) -> ClientHooks:
        """Open a client's state and correction before its local steps."""
        facts = {"index": task.client, "round": self._round, "samples": samples}
        record = self.state.tensor(task.client) if self.kept else None  # hooks may change it in place
        return ClientHooks(self, task, record, facts, self._seen)

    def add(self, returned: Any) -> None:
        """Add the vectors and numbers that `finish` returned to their sums."""
        wanted = (*self.sums, *self.returned)
        found = {} if returned is None else returned
        if not isinstance(found, Mapping) or set(found) != set(wanted):
            names = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(f"finish returned {names}, but sums and numbers declare {', '.join(wanted) or 'no names'}")
        for name in self.sums:
            vector = vector_like(self._start, found[name], f"what finish returns as {name!r}")
            self._accumulators[name].add(self._finite(vector, f"what finish returns as {name!r}"), 1.0)
        for name in self.returned:
            number = math.nan if is_complex(found[name]) else float(found[name])
            if not abs(self.totals[name]) + abs(number) < LARGEST:
                raise ValueError(
                    f"finish returned {number:g} as {name!r}. Return a finite number; sums hold less than 2**50"
                )
            self._count(name, number)

    def _count(self, name: str, number: float) -> None:
        self.totals[name] += float(np.rint(number * NUMBER_GRID)) / NUMBER_GRID if self.exact else number

    def _finite(self, vector: Tensor, what: str) -> Tensor:
        """Return a vector that a custom hook made if it is finite."""
        if self.part.foreign and not bool(torch.isfinite(vector).all()):
            raise ValueError(f"{what} is not finite. Lower local.lr or server.optimizer.lr, or mend it")
        return vector

    def keep(self, client: int, vectors: dict[str, Tensor], record: Tensor) -> None:
        """Store a client's state; reuse `record`, which the client was given, if all vectors are still in it."""
        self._kept += [(client, name, vector.sum()) for name, vector in vectors.items()]
        if record.device.type == "cpu":
            self.settle()
        rows = zip(self.rows(record).values(), vectors.values(), strict=True)
        within = all(row.data_ptr() == own.data_ptr() and own.is_contiguous() for row, own in rows)
        self.state.put(client, record if within else torch.cat([*vectors.values()]).view(record.shape))

    def rows(self, record: Tensor) -> dict[str, Tensor]:
        """Return the vectors of a record by name."""
        return dict(zip(self.kept, torch.split(record.reshape(-1), [*self.kept.values()]), strict=True))

    def settle(self) -> None:
        """Check the sums of the state kept since the last call; on a GPU the host waits for them once per round."""
        kept, self._kept = self._kept, []
        finite = torch.stack([total for *_, total in kept]).cpu().isfinite().tolist() if kept else []
        for (client, name, _), sound in zip(kept, finite, strict=True):
            if not sound:
                with calling(self.part, self._round, client):
                    raise ValueError(f"client.{name} is not finite. Lower local.lr")

    def server_step(self, update: Tensor, sums: Mapping[str, Any], totals: Totals) -> Tensor:
        """Return the update (d,) for the server optimizer; with no selected clients, the given update.

        Float buffers keep their weighted mean whatever the algorithm returns.
        """
        for name, place in self.model.layout.items() if self.model.copies else ():
            weight = sums[f"copy {name.partition('.')[0]} weight"]
            update[place] *= totals.divisor / weight if weight else 1.0  # each copy has the mean of its clients
        if not self.steps_server or not totals.participants:
            return update
        facts, before = {"model": self._start, "round": totals.round}, dict(self.server)
        buffers = update[self.model.trainable :].clone()
        server = Vectors("server", self.server, facts)
        with torch.no_grad(), calling(self.part, totals.round):
            drawing = self.streams.later(Purpose.ALGORITHM_SERVER, totals.round)
            returned = self.algorithm.server_step(server, update, sums, totals, drawing)
            chosen = update if returned is None else vector_like(update, returned, "the update of server_step")
            self._finite(chosen, "the update of server_step")
            if len(buffers):  # an extrapolated variance may become negative
                chosen = torch.cat([chosen[: self.model.trainable], buffers])
            for name, vector in self.server.items():
                if not bool(torch.isfinite(vector.sum())):
                    raise ValueError(f"server.{name} is not finite. Lower local.lr or server.optimizer.lr")
        for name, vector in self.server.items():
            if vector is not before[name]:
                self.server[name] = vector.clone()  # it may be the update or another vector of the server
        return chosen

    def server_tensors(self) -> dict[str, Tensor]:
        """Return the server's vectors for a checkpoint."""
        return {f"{PREFIX}{name}": vector for name, vector in self.server.items()}

    def load_server(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the server's vectors from a checkpoint."""
        for name in self.server_state:
            if f"{PREFIX}{name}" in tensors:
                self.server[name] = tensors[f"{PREFIX}{name}"].clone()


class ClientHooks:
    """Hooks of one client in one round."""

    def __init__(self, hooks: Hooks, task: ClientTask, record: Tensor | None, facts: dict[str, Any], server: Vectors):
        self.hooks, self.task, self.server, self._record = hooks, task, server, record
        round = task.stream_round(hooks._round)
        self.generator = hooks.streams.later(Purpose.ALGORITHM, round, task.client)  # in the order of the hooks' calls
        self.client = Vectors("client", {} if record is None else hooks.rows(record), facts)

    @property
    def personal(self) -> Tensor | None:
        """Personal values (p,) of the client, None if the model has none."""
        found: Tensor | None = self.client._vectors.get("personal")
        return found

    @cached_property
    def correction(self) -> Tensor | None:
        """Return the vector (t,) added to each gradient, t trainable values; the first read calls the hook."""
        hooks = self.hooks
        if not hooks.corrects:
            return None
        with torch.no_grad(), self.calling():
            found = hooks.algorithm.correction(self.client, self.server, self.generator)
            if found is None:
                return None
            vector = vector_like(hooks._start, found, "the correction")[: hooks.model.trainable]
            return hooks._finite(vector, "the correction")

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Guard every call of a hook."""
        hooks = self.hooks
        given = (hooks._start, *(hooks.server[name] for name in hooks.sent))
        before = [vector._version for vector in given]  # counts writes
        with calling(hooks.part, hooks._round, self.task.client):
            yield
            if [vector._version for vector in given] != before:
                raise ValueError(f"it changed the model or a vector of the server in place: {FIXED}")

    def loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the algorithm's own loss of a batch, a tensor ()."""
        objective = self.hooks.algorithm.objective
        assert objective is not None
        loss = objective(module, x, y, self.client, self.server, self.generator)
        if not isinstance(loss, Tensor):
            raise TypeError(f"objective returned {type(loss).__name__}, not the loss as a tensor")
        return loss.mean() if loss.dim() else loss

    def train(self, steps: Callable[..., Tensor]) -> None:
        """Let the algorithm take the client's steps."""
        with self.calling():
            self.hooks.algorithm.train(self.client, self.server, steps, self.generator)

    def personal_model(self, steps: Callable[..., Tensor]) -> Tensor:
        """Return the model (d,) with which the client is evaluated."""
        with self.calling():
            found = self.hooks.algorithm.personal_model(self.client, self.server, steps)
            return vector_like(self.hooks._start, found, "the personal model")

    def finish(self, delta: Tensor, steps: int, rule: LocalRule) -> None:
        """Pass the client's update (d,) to the algorithm, which sets its state and returns the values to sum."""
        hooks = self.hooks
        if not hooks.finishes:
            return
        work = Work(delta, steps, rule.lr, self.task.coefficient, rule.proximal_mu, int(self.client.samples))
        before = delta._version
        with torch.no_grad(), self.calling():
            returned = hooks.algorithm.finish(self.client, self.server, work, self.generator)
            if delta._version != before:
                raise ValueError(
                    "finish changed work.delta in place, but the update is sent as it was. Compute with a copy, "
                    "work.delta.clone(); change the model in correction, objective or server_step"
                )
            hooks.add(returned)
            if (copy := hooks.model.active) is not None:
                hooks._count(f"copy {copy} weight", self.task.coefficient)
                hooks._count(f"copy {copy} clients", 1.0)
            if self._record is not None:
                hooks.keep(self.task.client, self.client._vectors, self._record)


def deliver(
    task: ClientTask, update: Tensor, job: RoundJob, observe: Observer | None, hooks: ClientHooks | None, steps: int
) -> None:
    """Add coefficient · Δ, or the observer's replacement of Δ, to the sum; the client's hooks see the original Δ."""
    if hooks is not None:
        hooks.finish(update, steps, job.rule)
    replaced = observe(task.client, update) if observe is not None else None
    job.total.add(update if replaced is None else replaced, task.coefficient, task.client)


def make_hooks(config: Config, model: FlatModel, streams: Streams, population: int) -> Hooks | None:
    """Build the hooks of the configured algorithm; None for plain local steps without personal values."""
    chosen = local_algorithm(config)
    if chosen is None and not model.personal and not model.copies:
        return None
    part, algorithm = chosen or (config.local.algorithm, config.local.algorithm.make())
    memory = config.cluster.state_memory * 2**30
    hooks = Hooks(part, algorithm, model, streams, population, memory, config.server.exact)
    pulls = hooks.corrects or hooks.proximal_mu > 0 or config.local.proximal_mu > 0
    if model.personal and pulls and not is_plain_sgd(config.local.optimizer):
        raise UserError(
            f"local.optimizer = {config.local.optimizer!r} cannot leave the values of local.personal out of a "
            'proximal term or a correction. Set local.optimizer = "sgd", without options'
        )
    return hooks


def overrides(algorithm: LocalAlgorithm, name: str) -> bool:
    """Check whether an algorithm overrides a hook."""
    own = getattr(algorithm, name)
    return getattr(own, "__func__", own) is not getattr(LocalAlgorithm, name)


def declared(part: Component, algorithm: LocalAlgorithm, field: str, taken: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names that an algorithm declares in a field."""
    names = names_in(part, algorithm, field)
    for name in names:
        usable = isinstance(name, str) and name.isidentifier() and not name.startswith("_")
        if not usable or name in taken or names.count(name) > 1:
            raise UserError(f"{part.name}: {field} names {name!r}, which is reserved or not a valid attribute name")
    return names
