"""Choice of the engine for the local work: merged where it is exact, otherwise batched or sequential.

Only this module imports `local.batched`, which a run can do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.data.schema import DataDescription
from fedmpi.data.source import DataSource
from fedmpi.local.failures import OnDivergence
from fedmpi.local.hooks import Hooks
from fedmpi.local.merged import MergedEngine, Rows
from fedmpi.local.optimizers import is_plain_sgd, own_optimizer
from fedmpi.local.schedule import batch_rows, needs_order, step_count
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.local.work import ClientTask, Engine, LocalRule, Observer, RoundJob, WorkReport
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import LOSS_ALONE

if TYPE_CHECKING:
    from fedmpi.config import Config
    from fedmpi.local.batched.engine import BatchedEngine


LARGEST_BATCH = 64 << 20
"""Bytes of a client's activations on a CPU above which batching gains nothing. Batched clients of cifar-cnn (31 MiB)
take 0.7 of the sequential time; those of resnet18 (340 MiB) take the same time."""


class LocalEngine:
    """Engine of the round loop: merges one-step clients where that is exact, and leaves the others to a second engine.

    `why` is the reason for the second one, `rest`; "" if it is the batched engine of "auto". `not_merged` is the reason
    why nothing is merged; `merged` is None if the user chose one engine for all clients.
    """

    def __init__(
        self,
        sequential: SequentialEngine,
        rest: Engine,
        why: str = "",
        merged: MergedEngine | None = None,
        not_merged: str | None = None,
    ):
        self.sequential, self.rest, self.why, self.merged, self.not_merged = sequential, rest, why, merged, not_merged
        self.name = rest.name if merged is None else "auto"
        self.merged_clients = self.other_clients = 0

    @property
    def merging(self) -> bool:
        """Check whether one-step clients may be merged."""
        return self.merged is not None and self.not_merged is None

    @property
    def description(self) -> str:
        """Describe the engines and the reasons, with the number of clients each has trained on this rank so far."""
        if self.merged is None:
            return f'{self.name}: as local.engine = "{self.name}" says'
        others = f"{self.rest.name} ({self.why})" if self.why else self.rest.name
        if self.not_merged is not None:
            return f"auto: {others}; nothing is merged: {self.not_merged}"
        so_far = f"; so far {self.merged_clients} merged and {self.other_clients} others on this rank"
        counts = so_far if self.merged_clients or self.other_clients else ""
        return f"auto: one-step clients are merged, the others {others}{counts}"

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum; see `Engine.train`."""
        together: list[ClientTask] = []
        if self.merged is not None and self._merges(job.rule, job.total):
            together = [task for task in tasks if self.merged.accepts(task, job.rule)]
        report, merged = WorkReport(), set(map(id, together))
        others = [task for task in tasks if id(task) not in merged]
        if together and self.merged is not None:
            report += self.merged.train(together, job)
        if others or self.merged is None:
            report += self.rest.train(others, job)
        self.merged_clients += len(together)
        self.other_clients += len(others)
        return report

    def merges_rows(self, rule: LocalRule, largest: int, total: Accumulator) -> bool:
        """Check whether `train_rows` may be used for up to `largest` samples per client: one step must see them all."""
        rows = max(largest, 1)
        return step_count(rule, rows) == 1 and not needs_order(rule, rows) and self._merges(rule, total)

    def train_rows(self, drawn: Rows, job: RoundJob) -> WorkReport:
        """Train samples of any number of clients, without a task for each; see `MergedEngine.train_rows`."""
        assert self.merged is not None
        report = self.merged.train_rows(drawn, job)
        self.merged_clients += report.clients
        return report

    def _merges(self, rule: LocalRule, total: Accumulator) -> bool:
        return self.merged is not None and self.not_merged is None and self.merged.refusal(rule, total) is None


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
        return LocalEngine(sequential, sequential)
    merged = MergedEngine(sequential)
    not_merged = _why_not_merged(config, observer, hooks) or merged.model_refusal()
    if wanted == "merged":
        _demand(wanted, not_merged)
        return LocalEngine(sequential, merged)
    not_batched = _why_one_by_one(config, model, hooks) or why_not_batched(model, source.description)
    if wanted == "batched":
        _demand(wanted, not_batched)
    if not_batched is not None:
        return LocalEngine(sequential, sequential, not_batched, merged, not_merged)
    batched = batched_engine(sequential)
    if wanted == "batched":
        return LocalEngine(sequential, batched)
    sizes = source.sizes[source.sizes > 0]
    usual = batch_rows(LocalRule.scheduled(config.local), int(np.median(sizes)) if len(sizes) else 1)
    activations = batched.net.values_per_row * usual * model.initial.element_size()
    if model.device.type == "cpu" and activations > LARGEST_BATCH:
        why = f"a batch of one client has {activations >> 20} MiB of activations"
        return LocalEngine(sequential, sequential, why, merged, not_merged)
    return LocalEngine(sequential, batched, "", merged, not_merged)


def _why_not_merged(config: Config, observer: Observer | None, hooks: Hooks | None) -> str | None:
    """Return why the configuration needs every client's own update or model, or None."""
    if not is_plain_sgd(config.local.optimizer):
        return f"local.optimizer = {config.local.optimizer!r} is not linear in the gradient"
    if config.topology.name == "mediators":
        return "mediators carry one model from client to client"
    if observer is not None:
        return "clipping, transport, attacks or diagnostics need every client's own update"
    if config.server.aggregator.name != "mean":
        return f"server.aggregator = {config.server.aggregator.name!r} needs every client's own update"
    if hasattr(config.server.weights.component.object, "after"):
        return f"server.weights = {config.server.weights.name!r} needs every client's own update"
    if config.server.exact:
        return "server.exact needs every client's own update"
    return None if hooks is None else hooks.alone


def _why_one_by_one(config: Config, model: FlatModel, hooks: Hooks | None) -> str | None:
    """Return why clients cannot be batched, or None."""
    if config.topology.name == "mediators":
        return "mediators carry one model from client to client"
    if config.server.exact:
        return "server.exact: the rounding of a stack depends on who is in it"
    if config.local.precision != "float32":
        return f'local.precision = "{config.local.precision}": its layers compute in float32'
    if own_optimizer(config) is not None:  # SGD with momentum, too
        return f'local.optimizer = "{config.local.optimizer.name}" steps on the parameters of one client'
    if hooks is not None and hooks.own_loss:
        return f"local.algorithm = {hooks.part.name!r} has its own objective()"
    if hooks is not None and hooks.corrects and model.embeddings:
        return "corrections move the vectors of all words, not only of those in a client's texts"
    return None


def _demand(engine: str, reason: str | None) -> None:
    if reason is not None:
        raise UserError(f'local.engine = "{engine}" is not possible here: {reason}; choose "auto"')


def why_not_batched(model: FlatModel, description: DataDescription) -> str | None:
    """Return the reason why the batched engine cannot train a model with its loss, None if it can."""
    traits = forward_traits(model, description)
    if not model.plain and (traits.keeps or traits.couples or model.hooked):
        return "its forward pass keeps something, draws random numbers, joins the samples of a batch, or has hooks"
    try:
        from fedmpi.local.batched.base import NotStackable
        from fedmpi.local.batched.translation import translate
    except ImportError:
        return "fedmpi.local.batched is missing"
    try:
        translate(model.module, description, model.stacked_forms)
    except NotStackable as reason:
        return str(reason)
    return LOSS_ALONE if traits.loss_couples else None


def batched_engine(sequential: SequentialEngine) -> BatchedEngine:
    """Build the batched engine."""
    from fedmpi.local.batched.engine import BatchedEngine

    return BatchedEngine(sequential)
