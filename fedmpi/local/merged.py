"""The merged engine: computes clients that take one SGD step from the same model as one weighted gradient.

Σ_k c_k Δ_k = −η Σ_k (c_k / r_k) Σ_i ∇ℓ_i(w), over the r_k samples of client k's only batch. It is exact up to
floating-point rounding, and its cost depends on the number of samples, not of clients. FedProx's term is 0 in a first
step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.apportionment import offsets_of, places_within
from fedmpi.common.arithmetic import to_device
from fedmpi.common.errors import ComponentFailure, Divergence
from fedmpi.common.streams import Purpose
from fedmpi.common.types import Ints
from fedmpi.data.source import loaded_ahead
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.local.work import (
    LARGEST_LOSS,
    ClientTask,
    LocalRule,
    RoundJob,
    Rows,
    WorkReport,
    batch_rows,
    needs_order,
    schedule,
    step_count,
    task_size,
)
from fedmpi.models.flat import add_gradients
from fedmpi.models.layers import joined_masks, no_masks

CHUNK_ROWS = {"cpu": 512, "cuda": 4096}
"""Samples per pass; on a CPU few enough to keep the activations in the cache."""


class MergedEngine:
    """Engine that trains any number of one-step clients as one weighted batch, cut into chunks."""

    name = "merged"

    def __init__(self, sequential: SequentialEngine):
        self.sequential, self.model, self.source = sequential, sequential.model, sequential.source
        self._rows: int | None = None
        self._offsets: Ints | None = None

    def accepts(self, task: ClientTask, rule: LocalRule) -> bool:
        """Check whether the task is a single step."""
        return step_count(rule, task_size(task, self.source.sizes)) <= 1

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of one-step tasks to the job's sum; a failing client is named by a ClientFailure."""
        clients, rows, counts = self._rows_of(tasks, job.rule, job.round)
        coefficients = np.fromiter((task.coefficient for task in tasks), np.float64, len(tasks))
        weights = np.repeat(coefficients / np.maximum(counts, 1), counts)
        report = self.train_rows(Rows(np.repeat(clients, counts), rows, weights), job, tasks)
        report.clients, report.weight = len(tasks), float(coefficients.sum())
        report.samples = sum(task_size(task, self.source.sizes) for task in tasks)
        return report

    def train_rows(self, drawn: Rows, job: RoundJob, tasks: Sequence[ClientTask] | None = None) -> WorkReport:
        """Add −η Σ_i weights_i ∇ℓ_i(start) to the sum, without a loop over clients unless the model has dropout.

        The report counts owners as `clients`; its `weight` is Σ weights. If a gradient is not finite, the owners are
        trained one at a time, by `tasks` or by their rows, so that the failing one is named.
        """
        try:
            return self._train_rows(drawn, job)
        except (Divergence, ComponentFailure) as failure:
            if tasks is None:
                owners, counts = _runs(drawn.clients)
                ends = np.cumsum(counts)
                coefficients = drawn.weights[ends - 1] * counts
                parts = zip(owners.tolist(), np.split(drawn.rows, ends[:-1]), coefficients.tolist(), strict=True)
                tasks = [ClientTask(*part) for part in parts]
            self.sequential.name_failing(failure, tasks, job)

    def _train_rows(self, drawn: Rows, job: RoundJob) -> WorkReport:
        rule, total, clients = job.rule, job.total, drawn.clients
        assert isinstance(total, FloatSum) and rule.optimizer == "sgd"
        report = WorkReport(samples=len(clients), weight=float(drawn.weights.sum()), loss_count=len(clients))
        report.clients = report.steps = _runs(clients)[0].size
        views, found, load = self.model.views(total.tensor), [], partial(self._load, drawn, report)
        for part, x, y in loaded_ahead(load, self._chunks(clients), self.model.device):
            losses = self._add_chunk(views, part, x, y, job)
            del x, y  # before the next but one are loaded
            total.added()
            found.append(torch.stack([losses.sum(dtype=torch.float64), losses.abs().max().double()]))
        for loss_sum, largest in torch.stack(found).cpu().tolist() if found else ():
            if not largest < LARGEST_LOSS:
                raise Divergence(f"a loss is too large in round {job.round} at lr = {rule.lr:g}. Lower local.lr")
            report.loss_sum += loss_sum
        if not math.isfinite(total.squared_norm()):
            raise Divergence(f"the sum of the updates overflows in round {job.round}. Lower local.lr")
        return report

    def _add_chunk(self, views: list[Tensor], drawn: Rows, x: Tensor, y: Tensor, job: RoundJob) -> Tensor:
        """Add one chunk's weighted gradient to the views; return the samples' losses (r,)."""
        self.model.look(job.start)
        if not self.model.module.training:
            self.model.module.train()
        self.model.masks.source = no_masks
        if job.rule.dropout and self.model.has_dropout:
            owners, counts = _runs(drawn.clients)
            of_client = partial(self.sequential.streams.generator, Purpose.DROPOUT, job.round)
            masks = joined_masks if self.model.device.type == "cpu" else self.model.sent.open
            self.model.masks.source = masks([*map(of_client, owners.tolist())], counts.tolist())
        factors = to_device(drawn.weights, self.model.device).to(self.model.dtype)
        tokens = CHUNK_ROWS["cpu"] * math.prod(self.source.description.feature_shape)
        with self.model.sparse_embeddings(self.model.sparse_pays(tokens)):
            losses, gradients = self.model.weighted_gradient(x, y, factors)
        add_gradients(views, gradients, -job.rule.lr)
        return losses

    def _rows_of(self, tasks: Sequence[ClientTask], rule: LocalRule, round: int) -> tuple[Ints, Ints, Ints]:
        """Return the clients (m,), the samples of their single batches, concatenated, and their numbers (m,)."""
        sizes = self.source.sizes
        clients = np.fromiter((task.client for task in tasks), np.int64, len(tasks))
        given = [self._batch(task, rule, task_size(task, sizes), round) for task in tasks]
        partial = np.fromiter((rows is not None for rows in given), bool, len(tasks))
        counts = sizes[clients]
        counts[partial] = [len(rows) for rows in given if rows is not None]
        rows = places_within(counts)
        if partial.any():
            rows[np.repeat(partial, counts)] = np.concatenate([chosen for chosen in given if chosen is not None])
        return clients, rows, counts

    def _batch(self, task: ClientTask, rule: LocalRule, n: int, round: int) -> Ints | None:
        """Return the local samples of the task's only batch; None = all of the client's."""
        if not needs_order(rule, n):
            return task.rows
        generator = self.sequential.streams.generator(Purpose.BATCH_ORDER, round, task.client)
        [chosen] = schedule(rule, n, generator)
        assert chosen is not None and len(chosen) == batch_rows(rule, n)
        return chosen if task.rows is None else task.rows[chosen]

    def _chunks(self, clients: Ints) -> Iterator[slice]:
        """Yield the samples of each pass, about `_rows`; it ends between clients if masks are drawn per client."""
        ends = np.cumsum(_runs(clients)[1]) if self.model.has_dropout else np.arange(1, len(clients) + 1)
        if self._rows is None:
            device = self.model.device
            most = CHUNK_ROWS.get(device.type, CHUNK_ROWS["cpu"])
            self._rows = rows_of_a_pass(self.model, self.source.description, most, training=True)
        first = 0
        while first < len(clients):
            place = int(np.searchsorted(ends, first + self._rows, side="right"))
            last = int(ends[place - 1] if place and ends[place - 1] > first else ends[place])
            yield slice(first, last)
            first = last

    def _load(self, drawn: Rows, report: WorkReport, part: slice) -> tuple[Rows, Tensor, Tensor]:
        """Load the samples of one pass."""
        started = time.perf_counter()
        if self._offsets is None:
            self._offsets = offsets_of(self.source.sizes)
        rows = Rows(drawn.clients[part], drawn.rows[part], drawn.weights[part])
        x, y = self.source.load_positions(self._offsets[rows.clients] + rows.rows)
        report.load_seconds += time.perf_counter() - started
        return rows, x, y


def _runs(clients: Ints) -> tuple[Ints, Ints]:
    """Return the clients of consecutive equal entries and the length of each run."""
    if not len(clients):
        return clients, clients
    starts = np.flatnonzero(np.concatenate([[True], clients[1:] != clients[:-1]]))
    return clients[starts], np.diff(np.append(starts, len(clients)))
