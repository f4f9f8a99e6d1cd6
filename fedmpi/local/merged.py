"""The merged engine: computes clients that take one SGD step from the same model as one weighted gradient.

Σ_k c_k Δ_k = −η Σ_k (c_k / r_k) Σ_i ∇ℓ_i(w), over the r_k samples of client k's only batch. It is exact up to
floating-point rounding, and its cost depends on the number of samples, not of clients. FedProx's term is 0 in a first
step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator, FloatSum
from fedmpi.common.errors import ClientFailure, ComponentFailure, Divergence, UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.data.source import DataSource
from fedmpi.local.failures import LARGEST_LOSS, OnDivergence, check_loss, halved, named_client
from fedmpi.local.schedule import batch_rows, needs_order, schedule, step_count
from fedmpi.local.traits import forward_traits, rows_of_a_pass
from fedmpi.local.work import ClientTask, LocalRule, WorkReport, task_size
from fedmpi.models.dropout import JoinedMasks, NoMasks
from fedmpi.models.flat import FlatModel, Precision, add_gradients
from fedmpi.models.isolation import why_untraceable
from fedmpi.tasks.losses import LOSS_ALONE

CHUNK_ROWS = {"cpu": 512, "cuda": 4096}
"""Samples per pass; on a CPU few enough to keep the activations in the cache."""


class _TooMany(Exception):
    """Error for a device without enough memory for a pass of so many samples."""


class MergedEngine:
    """Engine that trains any number of one-step clients as one weighted batch, cut into chunks."""

    name = "merged"
    description = "merged: one-step clients as one weighted gradient"

    def __init__(
        self,
        model: FlatModel,
        source: DataSource,
        streams: Streams,
        rank: int = 0,
        precision: Precision = "float32",
        on_divergence: OnDivergence | None = None,
    ):
        self.on_divergence = on_divergence or OnDivergence()
        self._left_out: list[int] = []
        self._rows: int | None = None
        self._start = model.initial
        self.model, self.source, self.streams, self.rank, self.precision = model, source, streams, rank, precision
        self._offsets: Ints | None = None

    def refusal(self, rule: LocalRule, total: Accumulator) -> str | None:
        """Return why merging would not be exact, or None if it is."""
        if rule.optimizer != "sgd":
            return f'local.optimizer = "{rule.optimizer}" is not linear in the gradient'
        if not isinstance(total, FloatSum):
            return "the sum needs every client's own update"
        return self.model_refusal()

    def model_refusal(self) -> str | None:
        """Return why this model's one-step clients cannot be merged, or None."""
        model, description = self.model, self.source.description
        traits = forward_traits(model, description)
        if traits.keeps:
            return "the forward pass changes parameters, buffers (batch norm) or attributes, or draws random numbers"
        if traits.couples:
            return (
                "a sample's outputs depend on the other samples of its batch, or on random numbers of the model's own"
            )
        if model.hooked:
            return "hooks may clip or normalize the gradients of a batch"
        if not model.plain and (reason := why_untraceable(model.module)):
            return f"torch.fx cannot trace the forward pass: {reason}"
        return LOSS_ALONE if traits.loss_couples else None

    def accepts(self, task: ClientTask, rule: LocalRule) -> bool:
        """Check whether the task is a single step."""
        return task.visit == 0 and step_count(rule, task_size(task, self.source.sizes)) <= 1

    def train(
        self, tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, total: Accumulator
    ) -> WorkReport:
        """Add Σ coefficient · Δ of one-step tasks to `total`.

        Raises
        ------
        UserError
            Merging is not exact for this configuration, or a task has several steps.
        ClientFailure
            A loss or a gradient is not finite.
        """
        if not all(self.accepts(task, rule) for task in tasks):
            raise UserError(
                'local.engine = "merged" needs clients that take a single step: set local.steps = 1, or choose "auto"'
            )
        clients, rows, counts = self._rows_of(tasks, rule, round)
        coefficients = np.fromiter((task.coefficient for task in tasks), np.float64, len(tasks))
        weights = np.repeat(coefficients / np.maximum(counts, 1), counts)
        report = self.train_rows(np.repeat(clients, counts), rows, weights, start, rule, round, total)
        if self._left_out:
            tasks = [task for task in tasks if task.client not in self._left_out]
            coefficients = coefficients[~np.isin(clients, self._left_out)]
        report.clients, report.weight = len(tasks), float(coefficients.sum())
        report.samples = sum(task_size(task, self.source.sizes) for task in tasks)
        return report

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
        """Add −η Σ_i weights_i ∇ℓ_i(start) to `total`, without a loop over clients unless the model has dropout.

        `clients` and `rows` (r,) are the owner and the local row of every sample, grouped by client; `weights` (r,) are
        c_k / r_k of the owner. The report counts owners as `clients`; its `weight` is Σ weights.
        """
        reason = self.refusal(rule, total)
        if reason is not None:
            raise UserError(f'local.engine = "merged" is not exact here: {reason}; choose "auto"')
        assert isinstance(total, FloatSum)
        self._left_out = []
        before = total.copied() if self.on_divergence.drops else None
        try:
            return self._train_rows(clients, rows, weights, start, rule, round, total)
        except ClientFailure as failure:
            self.on_divergence.leave_out(failure, round)
        assert before is not None
        total.put_back(before)
        self._left_out = self._diverged(clients, rows, weights, start, rule, round)
        kept = ~np.isin(clients, self._left_out)
        report = self._train_rows(clients[kept], rows[kept], weights[kept], start, rule, round, total)
        report.diverged = len(self._left_out)
        return report

    def _train_rows(
        self,
        clients: Ints,
        rows: Ints,
        weights: Floats,
        start: Tensor,
        rule: LocalRule,
        round: int,
        total: FloatSum,
    ) -> WorkReport:
        report = WorkReport(samples=len(rows), weight=float(weights.sum()), loss_count=len(rows))
        report.clients = report.steps = _runs(clients)[0].size
        views = self.model.views(total.tensor)
        self._start = start
        with self.model.computing_in(self.precision):
            first, ends = 0, self._ends(clients)
            while first < len(clients):
                part = self._chunk(ends, first)
                try:
                    losses = self._add_chunk(views, clients[part], rows[part], weights[part], rule, round, report)
                except _TooMany:
                    losses = None
                if losses is None:
                    self._rows = halved(part.stop - first, "samples in a pass")
                    continue
                total.added()
                self._check(losses, clients[part], rule)
                first = part.stop
            if not math.isfinite(total.squared_norm()):
                self._name_culprit(clients, rows, weights, start, rule, round)
        return report

    def _add_chunk(
        self,
        views: list[Tensor],
        clients: Ints,
        rows: Ints,
        weights: Floats,
        rule: LocalRule,
        round: int,
        report: WorkReport,
    ) -> Tensor:
        """Add one chunk's weighted gradient to the views; return the samples' losses (r,)."""
        started = time.perf_counter()
        x, y = self._load(clients, rows)
        loaded = time.perf_counter()
        self.model.look(self._start)
        if not self.model.module.training:
            self.model.module.train()
        self.model.draw_masks_from(NoMasks())
        if rule.dropout and self.model.has_dropout:
            owners, counts = _runs(clients)
            streams = [self.streams.generator(Purpose.DROPOUT, round, client) for client in owners.tolist()]
            self.model.draw_masks_from(JoinedMasks(streams, counts.tolist()))
        factors = torch.from_numpy(weights).to(device=self.model.device, dtype=self.model.dtype)
        try:
            with self.model.sparse_embeddings(self._prefer_sparse()):
                losses, gradients = self.model.weighted_gradient(x, y, factors)
        except ComponentFailure:
            self._name_the_failing(x, y, clients)
            raise
        except torch.OutOfMemoryError as error:
            if len(clients) == 1 or (self.model.has_dropout and clients[0] == clients[-1]):
                raise
            raise _TooMany from error
        add_gradients(views, gradients, -rule.lr)
        report.loss_sum += float(losses.sum(dtype=torch.float64))
        report.load_seconds += loaded - started
        return losses

    def _rows_of(self, tasks: Sequence[ClientTask], rule: LocalRule, round: int) -> tuple[Ints, Ints, Ints]:
        """Return the clients (m,), the samples of their single batches, concatenated, and their numbers (m,)."""
        sizes = self.source.sizes
        clients = np.fromiter((task.client for task in tasks), np.int64, len(tasks))
        given = [self._batch(task, rule, task_size(task, sizes), round) for task in tasks]
        partial = np.fromiter((rows is not None for rows in given), bool, len(tasks))
        counts = sizes[clients]
        counts[partial] = [len(rows) for rows in given if rows is not None]
        rows = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        if partial.any():
            rows[np.repeat(partial, counts)] = np.concatenate([chosen for chosen in given if chosen is not None])
        return clients, rows, counts

    def _batch(self, task: ClientTask, rule: LocalRule, n: int, round: int) -> Ints | None:
        """Return the local samples of the task's only batch; None = all of the client's."""
        if not needs_order(rule, n):
            return task.rows
        generator = self.streams.generator(Purpose.BATCH_ORDER, round, task.client)
        [chosen] = schedule(rule, n, generator)
        assert chosen is not None and len(chosen) == batch_rows(rule, n)
        return chosen if task.rows is None else task.rows[chosen]

    def _ends(self, clients: Ints) -> Ints:
        """Return where a pass may end: anywhere, or only between clients if masks are drawn per batch of a client."""
        return np.cumsum(_runs(clients)[1]) if self.model.has_dropout else np.arange(1, len(clients) + 1)

    def _chunk(self, ends: Ints, first: int) -> slice:
        """Return the samples of one pass from `first` on, about `_rows`; more if a single client has more."""
        if self._rows is None:
            device = self.model.device
            most = CHUNK_ROWS.get(device.type, CHUNK_ROWS["cpu"])
            self._rows = rows_of_a_pass(self.model, self.source.description, most, training=True)
        place = int(np.searchsorted(ends, first + self._rows, side="right"))
        last = int(ends[max(place - 1, 0)])
        return slice(first, last if last > first else int(ends[place]))

    def _load(self, clients: Ints, rows: Ints) -> tuple[Tensor, Tensor]:
        if self._offsets is None:
            sizes = self.source.sizes
            self._offsets = np.cumsum(sizes) - sizes
        return self.source.load_positions(self._offsets[clients] + rows)

    def _prefer_sparse(self) -> bool:
        description = self.source.description
        return self.model.sparse_pays(CHUNK_ROWS["cpu"] * math.prod(description.feature_shape))

    def _check(self, losses: Tensor, clients: Ints, rule: LocalRule) -> None:
        bearable = losses.abs() < LARGEST_LOSS
        if not bool(bearable.all()):
            place = int(torch.nonzero(~bearable)[0])
            self._fail(int(clients[place]), float(losses[place]), rule)

    def _fail(self, client: int, loss: float, rule: LocalRule) -> None:
        try:
            check_loss(loss, rule.lr)
        except Divergence as cause:
            raise ClientFailure(client, self.rank, cause) from cause

    def _name_the_failing(self, x: Tensor, y: Tensor, clients: Ints) -> None:
        """Raise the loss's failure again for the first client whose own samples it fails on."""
        first = 0
        for client, count in zip(*(part.tolist() for part in _runs(clients)), strict=True):
            with named_client(client, self.rank):
                self.model.losses(x[first : first + count], y[first : first + count])
            first += count

    def _name_culprit(
        self, clients: Ints, rows: Ints, weights: Floats, start: Tensor, rule: LocalRule, round: int
    ) -> None:
        """Find the first client whose gradient is not finite, if the sum is not although every loss is."""
        for client, _, squared in self._each(clients, rows, weights, start, rule, round):
            if not math.isfinite(squared):
                self._fail(client, squared, rule)
        raise Divergence(f"the sum of the updates overflows in round {round} at lr = {rule.lr:g}: lower local.lr")

    def _diverged(
        self, clients: Ints, rows: Ints, weights: Floats, start: Tensor, rule: LocalRule, round: int
    ) -> list[int]:
        """Return the clients with a loss or a gradient that is not finite."""
        self._start = start
        with self.model.computing_in(self.precision):
            return [
                client
                for client, losses, squared in self._each(clients, rows, weights, start, rule, round)
                if not math.isfinite(squared) or not bool((losses.abs() < LARGEST_LOSS).all())
            ]

    def _each(
        self, clients: Ints, rows: Ints, weights: Floats, start: Tensor, rule: LocalRule, round: int
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield every client, the losses of its samples, and the squared norm of its contribution to the sum."""
        own = torch.zeros_like(start)
        views = self.model.views(own)
        owners, counts = _runs(clients)
        for client, last, count in zip(owners.tolist(), np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            part = slice(last - count, last)
            own.zero_()
            losses = self._add_chunk(views, clients[part], rows[part], weights[part], rule, round, WorkReport())
            yield client, losses, float(own.dot(own))


def _runs(clients: Ints) -> tuple[Ints, Ints]:
    """Return the clients of consecutive equal entries and the length of each run."""
    if not len(clients):
        return clients, clients
    starts = np.flatnonzero(np.concatenate([[True], clients[1:] != clients[:-1]]))
    return clients[starts], np.diff(np.append(starts, len(clients)))
