"""Choice of the engine for the local work: merged where it is exact, otherwise batched or sequential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.local.acceleration import batched_engine, why_not_batched
from fedmpi.local.failures import OnDivergence
from fedmpi.local.hooks import Hooks
from fedmpi.local.merged import MergedEngine
from fedmpi.local.optimizers import AdamState
from fedmpi.local.schedule import batch_rows, needs_order, step_count
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.local.work import ClientTask, DataSource, Engine, LocalRule, Observer, WorkReport
from fedmpi.models.flat import FlatModel

if TYPE_CHECKING:
    from fedmpi.config import Config


LARGEST_BATCH = 64 << 20
"""Bytes of a client's activations on a CPU above which batching gains nothing. Batched clients of cifar-cnn (31 MiB)
take 0.7 of the sequential time; those of resnet18 (340 MiB) take the same time."""


class CompositeEngine:
    """Engine that merges one-step clients where that is exact and leaves the others to a second engine."""

    name = "auto"

    def __init__(
        self,
        merged: MergedEngine,
        sequential: SequentialEngine,
        rest: Engine,
        refusal: str | None = None,
        why_rest: str = "",
    ):
        self.merged, self.sequential, self.rest = merged, sequential, rest
        self.refusal, self.why_rest = refusal, why_rest
        self.merged_clients = self.other_clients = 0

    @property
    def description(self) -> str:
        """Describe the engines and the reasons, with the number of clients each has trained on this rank so far."""
        others = f"{self.rest.name} ({self.why_rest})" if self.why_rest else self.rest.name
        if self.refusal is not None:
            return f"auto: {others}; nothing is merged: {self.refusal}"
        counts = ""
        if self.merged_clients or self.other_clients:
            counts = f"; so far {self.merged_clients} merged and {self.other_clients} others on this rank"
        return f"auto: one-step clients are merged, the others {others}{counts}"

    def train(
        self, tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, total: Accumulator
    ) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to `total`; see `Engine.train`."""
        together, others = self._split(tasks, rule, total)
        report = WorkReport()
        if together:
            report += self.merged.train(together, start, rule, round, total)
        if others:
            report += self.rest.train(others, start, rule, round, total)
        self.merged_clients += len(together)
        self.other_clients += len(others)
        return report

    def merges_rows(self, rule: LocalRule, largest: int, total: Accumulator) -> bool:
        """Check whether `train_rows` may be used for up to `largest` samples per client: one step must see them all."""
        rows = max(largest, 1)
        return step_count(rule, rows) == 1 and not needs_order(rule, rows) and self._merges(rule, total)

    def train_rows(
        self,
        clients: Ints,
        rows: Ints,
        weights: Floats,
        start: Tensor,
        rule: LocalRule,
        round: int,
        total: Accumulator,
    ) -> WorkReport:
        """Train samples of any number of clients, without a task for each; see `MergedEngine.train_rows`."""
        report = self.merged.train_rows(clients, rows, weights, start, rule, round, total)
        self.merged_clients += report.clients
        return report

    def advance(
        self, w: Tensor, task: ClientTask, rule: LocalRule, round: int, state: AdamState | None = None
    ) -> WorkReport:
        """Train a model in place; see `SequentialEngine.advance`."""
        return self.sequential.advance(w, task, rule, round, state)

    def _merges(self, rule: LocalRule, total: Accumulator) -> bool:
        return self.refusal is None and self.merged.refusal(rule, total) is None

    def _split(
        self, tasks: Sequence[ClientTask], rule: LocalRule, total: Accumulator
    ) -> tuple[list[ClientTask], list[ClientTask]]:
        """Split the tasks into those that are merged and the others."""
        merges = self._merges(rule, total)
        alone = [merges and self.merged.accepts(task, rule) for task in tasks]
        together = [task for task, one in zip(tasks, alone, strict=True) if one]
        return together, [task for task, one in zip(tasks, alone, strict=True) if not one]


class SingleEngine:
    """Engine that the user chose, with the sequential one for training models in place."""

    def __init__(self, engine: Engine, sequential: SequentialEngine):
        self.engine, self.sequential = engine, sequential
        self.name = engine.name

    @property
    def description(self) -> str:
        """Report that the user chose this engine."""
        return f'{self.name}: as local.engine = "{self.name}" says'

    def train(
        self, tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, total: Accumulator
    ) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to `total`; see `Engine.train`."""
        return self.engine.train(tasks, start, rule, round, total)

    def advance(
        self, w: Tensor, task: ClientTask, rule: LocalRule, round: int, state: AdamState | None = None
    ) -> WorkReport:
        """Train a model in place; see `SequentialEngine.advance`."""
        return self.sequential.advance(w, task, rule, round, state)


LocalEngine = SingleEngine | CompositeEngine
"""Engine type of the round loop: it describes itself and can also train a model in place."""


def choose_engine(
    config: Config,
    model: FlatModel,
    source: DataSource,
    streams: Streams,
    rank: int = 0,
    observer: Observer | None = None,
    hooks: Hooks | None = None,
) -> LocalEngine:
    """Return the engine that `local.engine` names, or for "auto" the one that fits."""
    wanted, precision = config.local.engine, config.local.precision
    forward_traits(model, source.description)  # rejects a model that does not fit the data, on every rank
    leaving = OnDivergence(config.local.on_divergence == "drop")
    sequential = SequentialEngine(model, source, streams, rank, observer, precision, hooks, leaving)
    if wanted == "sequential":
        return SingleEngine(sequential, sequential)
    merged = MergedEngine(model, source, streams, rank, precision, leaving)
    not_merged = _why_not_merged(config, observer, hooks) or merged.model_refusal()
    if wanted == "merged":
        _demand(wanted, not_merged or _why_several_steps(config, source))
        return SingleEngine(merged, sequential)
    not_batched = _why_not_batched(config, model, hooks) or why_not_batched(model, source.description)
    if wanted == "batched":
        _demand(wanted, not_batched)
    if not_batched is not None:
        return CompositeEngine(merged, sequential, sequential, not_merged, not_batched)
    batched = batched_engine(model, source, streams, rank, observer, hooks=hooks, on_divergence=leaving)
    if wanted == "batched":
        return SingleEngine(batched, sequential)
    activations = batched.net.values_per_row * _usual_rows(config, source) * model.initial.element_size()
    if model.device.type == "cpu" and activations > LARGEST_BATCH:
        why = f"a batch of one client has {activations >> 20} MiB of activations"
        return CompositeEngine(merged, sequential, sequential, not_merged, why)
    return CompositeEngine(merged, sequential, batched, not_merged)


def _why_not_merged(config: Config, observer: Observer | None, hooks: Hooks | None) -> str | None:
    """Return why the configuration needs every client's own update or model, or None."""
    optimizer = config.local.optimizer.component.name
    if optimizer != "sgd":
        return f'local.optimizer = "{optimizer}" is not linear in the gradient'
    if config.topology.name == "mediators":
        return "mediators carry one model from client to client"
    if observer is not None:
        return "clipping, transport, attacks or diagnostics need every client's own update"
    if config.server.aggregator.name != "mean":
        return f"server.aggregator = {chosen(config, 'combiner').name!r} needs every client's own update"
    if hasattr(config.server.weights.component.object, "after"):
        return f"server.weights = {chosen(config, 'weights').name!r} needs every client's own update"
    if config.server.exact:
        return "server.exact needs every client's own update"
    return None if hooks is None else hooks.alone


def _why_not_batched(config: Config, model: FlatModel, hooks: Hooks | None) -> str | None:
    """Return why clients cannot be batched, or None."""
    if config.topology.name == "mediators":
        return "mediators carry one model from client to client"
    if config.server.exact:
        return "server.exact: the rounding of a stack depends on who is in it"
    if config.local.precision != "float32":
        return f'local.precision = "{config.local.precision}": its layers compute in float32'
    if (optimizer := config.local.optimizer.component).foreign:
        return f'local.optimizer = "{optimizer.name}" steps on the parameters of one client'
    if hooks is not None and hooks.own_loss:
        return f"local.algorithm = {hooks.part.name!r} has its own objective()"
    if hooks is not None and hooks.corrects and config.local.optimizer.name == "adam" and model.embeddings:
        return "corrections move the vectors of all words, which Adam's moments of unread ones would have to follow"
    return None


def _usual_rows(config: Config, source: DataSource) -> int:
    """Return the number of samples in a batch of the median client."""
    sizes = source.sizes[source.sizes > 0]
    return batch_rows(LocalRule.scheduled(config.local), int(np.median(sizes)) if len(sizes) else 1)


def _why_several_steps(config: Config, source: DataSource) -> str | None:
    """Return that some clients take several steps, if this is known before any samples are drawn, else None."""
    largest = int(source.sizes.max()) if config.samples.sampler.name == "all" else 1
    steps = step_count(LocalRule.scheduled(config.local), largest)
    return f"the largest client takes {steps} local steps, not one" if steps > 1 else None


def _demand(engine: str, reason: str | None) -> None:
    if reason is not None:
        raise UserError(f'local.engine = "{engine}" is not possible here: {reason}; choose "auto"')
