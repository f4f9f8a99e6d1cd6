"""The engine of the round loop, and the sequential engine: one client at a time on one flat working vector.

The sequential engine trains any nn.Module. It needs no optimizer object per client, no DataLoader and no copy of the
model. The vector is refilled, gradients are subtracted in place, and batches are slices of one gather.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import FixedPointSum, FloatSum
from fedmpi.common.arithmetic import to_device
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.data.source import DataSource, Tensors, loaded_ahead
from fedmpi.local.graphs import Graphs
from fedmpi.local.hooks import ClientHooks, Hooks, deliver
from fedmpi.local.optimizers import SGD, Adam, AdamState, Foreign, LocalOptimizer, clipped
from fedmpi.local.traits import forward_traits, rows_of_a_pass
from fedmpi.local.work import (
    ClientTask,
    Engine,
    LocalRule,
    Observer,
    OneStepEngine,
    RoundJob,
    WorkReport,
    batch_rows,
    check_loss,
    check_square,
    check_update,
    named_client,
    needs_order,
    passes,
    step_count,
    task_size,
)
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.evaluation import LOSS, client_sums

EVALUATION = 1 << 25
"""Visit number that selects the random streams of personal models in the evaluation."""
CHOICE_ROWS = 2000
"""Samples passed through a copy of the model at once when a client chooses."""
GATHER_BYTES = 1 << 22
"""Bytes gathered at once: large enough to spread the cost of the call, small enough for the cache."""


class LocalEngine:
    """Engine of the round loop: `merged` trains one-step clients, if there is such an engine, and `rest` all others."""

    def __init__(
        self, sequential: SequentialEngine, rest: Engine, description: str, merged: OneStepEngine | None = None
    ):
        self.sequential, self.rest, self.description, self.merged = sequential, rest, description, merged

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum; see `Engine.train`."""
        if self.merged is None:
            return self.rest.train(tasks, job)
        accepted = [self.merged.accepts(task, job.rule) for task in tasks]
        report = WorkReport()
        for engine, one_step in ((self.merged, True), (self.rest, False)):
            group = [task for task, found in zip(tasks, accepted, strict=True) if found == one_step]
            if group:
                report += engine.train(group, job)
        return report

    def merges_rows(self, rule: LocalRule, largest: int) -> bool:
        """Check whether up to `largest` samples per client may be merged: one step must see them all."""
        rows = max(largest, 1)
        return self.merged is not None and step_count(rule, rows) == 1 and not needs_order(rule, rows)


class SequentialEngine:
    """Engine that trains clients one at a time."""

    name = "sequential"

    def __init__(
        self,
        model: FlatModel,
        source: DataSource,
        streams: Streams,
        rank: int = 0,
        observe: Observer | None = None,
        hooks: Hooks | None = None,
    ):
        self.model, self.source, self.streams = model, source, streams
        self.rank, self.observe, self.hooks = rank, observe, hooks
        self._memory, self._graphs = WorkingMemory(model), Graphs(model.device)
        self._gathered: tuple[Tensor, Tensor] | None = None
        if model.has_dropout and model.device.type != "cpu":
            forward_traits(model, source.description)  # finds the masks of a step, which a GPU needs in advance

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum; a failing client is named by a ClientFailure."""
        report, unread, on_cpu = WorkReport(), [], job.start.device.type == "cpu"
        own = self.observe is not None or (self.hooks is not None and self.hooks.part.foreign)
        at_once = own or not isinstance(job.total, FloatSum | FixedPointSum)
        samples = loaded_ahead(self.load, tasks, job.start.device)
        for task in tasks:
            client = self.hooks_of(task)
            if self.model.copies:
                self.choose_copy(task.client, job.start, job.round)
            w = self.model.joined(job.start, client.personal if client else None, self._memory.vector)
            done = self.advance(w, task, job.rule, job.round, samples, hooks=client, wait=on_cpu)
            if client is not None and client.personal is not None:
                client.personal.copy_(self.model.personal_of(w))
            delta = w[self.model.shared].sub_(job.start)
            if not on_cpu:
                unread.append((task, torch.stack([self._memory.losses, delta.dot(delta).double()])))
            if at_once:
                self._read(unread, job.rule, report)
            with named_client(task.client, self.rank):
                if on_cpu:
                    check_update(delta, job.rule.lr)
                deliver(task, delta, job, self.observe, client, done.steps)
            done.weight = task.coefficient
            report += done
        self.model.active = None
        self._read(unread, job.rule, report)
        return report

    def choose_copy(self, client: int, shared: Tensor, round: int) -> None:
        """Activate the copy of the model with the lowest loss on a client's training samples (IFCA), if it has any."""
        model, losses = self.model, []
        if not self.source.sizes[client]:
            model.active = None
            return
        with named_client(client, self.rank):
            x, y = self.source.load(client, None)
            rows = rows_of_a_pass(model, self.source.description, CHOICE_ROWS)
            for copy in range(model.copies):
                model.active = copy
                with model.evaluating(shared, self.streams, Purpose.CLIENT_EVALUATION, round, client) as module:
                    sums = client_sums(module, x, y, np.array([len(y)]), model.loss, rows, model.part)
                losses.append(sums[0, LOSS])
        model.active = int(np.argmin(losses))

    def _read(self, unread: list[tuple[ClientTask, Tensor]], rule: LocalRule, report: WorkReport) -> None:
        """Check the losses and squared norms of clients, for which the host waits once."""
        found = torch.stack([numbers for _, numbers in unread]).cpu().tolist() if unread else []
        for (task, _), (loss_sum, square) in zip(unread, found, strict=True):
            with named_client(task.client, self.rank):
                check_loss(loss_sum, rule.lr)
                check_square(square, rule.lr)
            report.loss_sum += loss_sum
        unread.clear()

    def name_failing(self, failure: Exception, tasks: Sequence[ClientTask], job: RoundJob) -> NoReturn:
        """Train clients that failed together again, one at a time, so that the error names the failing one."""
        with torch.enable_grad():
            self.train(tasks, job)
        raise failure

    def hooks_of(self, task: ClientTask) -> ClientHooks | None:
        """Return a client's hooks for its steps of this round; None for plain ones."""
        if self.hooks is None:
            return None
        with named_client(task.client, self.rank):
            return self.hooks.open(task, task_size(task, self.source.sizes))

    def load(self, task: ClientTask) -> Tensors:
        """Load the samples of a client."""
        with named_client(task.client, self.rank):
            return self.source.load(task.client, task.rows)

    def advance(
        self,
        w: Tensor,
        task: ClientTask,
        rule: LocalRule,
        round: int,
        samples: Iterator[Tensors],
        state: AdamState | None = None,
        hooks: ClientHooks | None = None,
        wait: bool = True,
    ) -> WorkReport:
        """Take a client's local steps on `w` (d,), in place; without `wait`, its losses stay in the device's memory."""
        with named_client(task.client, self.rank):
            losses = self._memory.losses.zero_()
            started = time.perf_counter()
            x, y = next(samples)
            report = WorkReport(clients=1, samples=len(y), load_seconds=time.perf_counter() - started)
            if len(y) < self.model.least:
                return report
            if hooks is not None and hooks.hooks.trains:
                hooks.train(LocalSteps(self, w, task, rule, round, lambda: (x, y), report, hooks))
            else:
                self.take_steps(w, (x, y), task, rule, round, report, state, hooks)
                self.model.note_integers()
            if wait:
                report.loss_sum = report.loss_sum if losses.device.type == "cpu" else float(losses)
                check_loss(report.loss_sum, rule.lr)
            return report

    def personal_model(self, client: int, shared: Tensor, rule: LocalRule, round: int) -> Tensor:
        """Return the whole vector of the model with which a client is evaluated at the shared values (d,).

        If the model has copies, the client's one is active afterwards.
        """
        task = ClientTask(client, None, 0.0, visit=EVALUATION)
        hooks = self.hooks_of(task)
        assert hooks is not None
        if self.model.personal:
            return self.model.joined(shared, hooks.personal)
        if self.model.copies:
            self.choose_copy(client, shared, round)
            return shared
        w, load = self._memory.vector.copy_(shared), partial(self.load, task)
        with named_client(client, self.rank):
            return hooks.personal_model(LocalSteps(self, w, task, rule, round, load, WorkReport(), hooks))

    def take_steps(
        self,
        w: Tensor,
        samples: Tensors,
        task: ClientTask,
        rule: LocalRule,
        round: int,
        report: WorkReport,
        state: AdamState | None = None,
        hooks: ClientHooks | None = None,
        only: Literal["personal", "shared"] | None = None,
        towards: Tensor | None = None,
    ) -> None:
        """Take local steps on `w`, and add them to the report; see `LocalSteps` for `only` and `towards`."""
        (x, y), losses, at = samples, self._memory.losses, task.stream_round(round)
        own = hooks if hooks is not None and hooks.hooks.own_loss else None
        on_cpu = losses.device.type == "cpu"
        given, w = w, w if on_cpu else self._memory.vector.copy_(w)  # as graphs repeat steps on the same memory
        self.model.begin_training(w, self.streams, at, task.client, rule.dropout)
        correction = None if hooks is None else hooks.correction
        fixed = not on_cpu and own is None and rule.own is None and self.model.pure and only is None
        fixed = fixed and (not rule.rates or correction is None)
        fixed = fixed and needs_order(rule, len(y))  # else there are few steps, and as many shapes as client sizes
        factor = self._memory.factor.fill_(-rule.lr) if fixed and rule.optimizer == "sgd" else None
        optimizer = self._memory.optimizer(w, rule, state, correction, fixed, towards)
        drawing = self.model.seeded(self.streams, at, task.client, more=own is not None or rule.own is not None)
        tokens = batch_rows(rule, len(x)) * math.prod(x.shape[1:])
        sparse = not fixed and rule.optimizer == "sgd" and rule.clip_norm is None and self.model.sparse_pays(tokens)
        loss_of = None if own is None else own.loss
        masked = self.model.has_dropout and self.model.masks.source is self.model.sent
        kind = rule.optimizer, self.model.active, masked, rule.proximal_mu > 0, correction is None, rule.clip_norm
        own_count = self.model.own_parameters
        clip, scale = rule.clip_norm, factor if rule.clip_norm is None else None

        def step(batch_x: Tensor, batch_y: Tensor) -> None:
            loss, gradients = self.model.loss_gradient(batch_x, batch_y, loss_of, scale)
            if only is not None:
                gradients = [
                    one if (at < own_count) == (only == "personal") else None for at, one in enumerate(gradients)
                ]
            if clip is not None:
                gradients = clipped(gradients, clip, factor)
            optimizer.step(gradients)
            if on_cpu:
                report.loss_sum += loss.item() * len(batch_y)
            else:  # reading the loss would wait for the device
                losses.add_(loss, alpha=len(batch_y))

        with drawing, self.model.sparse_embeddings(sparse), own.calling() if own else nullcontext():
            for batch_x, batch_y in self._batches(x, y, task, rule, round, fixed):
                if masked:
                    self.model.sent.prepare([len(batch_y)], fixed)
                if rule.rates:
                    optimizer.set_rate(rule.rates[report.steps])
                    if factor is not None:
                        factor.fill_(-rule.rates[report.steps])
                if fixed:
                    self._graphs.run((kind, len(batch_y), batch_x.data_ptr()), partial(step, batch_x, batch_y))
                else:
                    step(batch_x, batch_y)
                if isinstance(optimizer, Adam):
                    optimizer.finish()
                report.steps += 1
                report.loss_count += len(batch_y)
        if given is not w:
            given.copy_(w)

    def _batches(
        self, x: Tensor, y: Tensor, task: ClientTask, rule: LocalRule, round: int, fixed: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of all steps; if `fixed`, those of one size are in the same memory."""
        n = len(y)
        size = batch_rows(rule, n)
        orders: Iterable[Tensor | None] = [None] * step_count(rule, n)
        if needs_order(rule, n):
            generator = self.streams.generator(Purpose.BATCH_ORDER, task.stream_round(round), task.client)
            orders = _sent(passes(rule, n, generator), y.device)
        row_bytes = max(1, x.element_size() * math.prod(x.shape[1:]))
        at_once = size * (1 if fixed else max(1, GATHER_BYTES // (row_bytes * size)))
        for order in orders:
            if order is None:
                yield x if self.hooks is None else x.clone(), y  # an algorithm's own loss may write to its arguments
                continue
            for rows in torch.split(order, at_once):
                some_x, some_y = self._gather(x, y, rows)
                yield from zip(torch.split(some_x, size), torch.split(some_y, size), strict=True)

    def _gather(self, x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples of a client in the order of visits, in memory that is reused."""
        buffers = self._gathered
        if buffers is None or len(buffers[0]) < len(rows) or buffers[0].shape[1:] != x.shape[1:]:
            buffers = self._gathered = x.new_empty(len(rows), *x.shape[1:]), y.new_empty(len(rows), *y.shape[1:])
        some_x, some_y = buffers[0][: len(rows)], buffers[1][: len(rows)]
        torch.index_select(x, 0, rows, out=some_x)
        torch.index_select(y, 0, rows, out=some_y)
        return some_x, some_y


@dataclass
class LocalSteps:
    """Local steps of one client, for an algorithm's `train` and `personal_model`; see `LocalAlgorithm`.

    Each call draws other batches and masks. Steps on the client's own model `w`, a whole vector, are reported.
    """

    engine: SequentialEngine
    w: Tensor
    task: ClientTask
    rule: LocalRule
    round: int
    load: Callable[[], Tensors]
    report: WorkReport
    hooks: ClientHooks

    def __call__(
        self,
        start: Tensor | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        lr: float | None = None,
        only: Literal["personal", "shared"] | None = None,
        towards: Tensor | None = None,
        proximal_mu: float | None = None,
    ) -> Tensor:
        engine, w, task, rule, shared = self.engine, self.w, self.task, self.rule, self.engine.model.shared
        self.task = replace(task, visit=task.visit + 1)
        if epochs is not None or steps is not None:
            rule = replace(rule, epochs=epochs, steps=steps)
        pull = proximal_mu if proximal_mu is not None else 0.0 if start is not None else rule.proximal_mu
        rule = replace(rule, lr=rule.lr if lr is None else lr, proximal_mu=pull)
        if start is None:
            engine.take_steps(w, self.load(), task, rule, self.round, self.report, None, self.hooks, only, towards)
            engine.model.note_integers()
            return w[shared].clone()
        before, losses = w.clone(), engine._memory.losses.clone()
        w[shared] = start
        engine.take_steps(w, self.load(), task, rule, self.round, WorkReport(), None, None, only, towards)
        found = w[shared].clone()
        w.copy_(before)
        engine._memory.losses.copy_(losses)
        return found


def _sent(orders: Iterable[Ints | None], device: torch.device) -> Iterable[Tensor]:
    """Return a client's orders of visits as tensors; a GPU receives all in one copy."""
    drawn = (order for order in orders if order is not None)
    if device.type == "cpu":
        return map(torch.from_numpy, drawn)
    together = [*drawn]
    return torch.split(to_device(np.concatenate(together), device), [*map(len, together)])


class WorkingMemory:
    """Vectors that an engine needs, allocated at the first use and then kept."""

    def __init__(self, model: FlatModel):
        self.model = model
        self.vector = torch.empty_like(model.whole)
        self.losses = torch.zeros((), dtype=torch.float64, device=model.device)
        self.factor, self.pull = torch.empty(2, dtype=model.dtype, device=model.device)
        self._start, self._correction = self.vector.new_empty(2, model.trainable)  # untouched pages cost nothing

    @cached_property
    def _adam(self) -> AdamState:
        return AdamState.fresh(self.model)

    def optimizer(
        self,
        w: Tensor,
        rule: LocalRule,
        state: AdamState | None,
        correction: Tensor | None,
        fixed: bool,
        towards: Tensor | None = None,
    ) -> LocalOptimizer:
        """Return the optimizer of one client's work on `w`; all `fixed` ones share their memory and numbers."""
        values = w[: self.model.trained]
        shared = values[self.model.shared.start :]  # the proximal term and corrections are for shared values
        centre = shared if towards is None else towards[: self.model.trainable]
        start = self._start.copy_(centre) if rule.proximal_mu else None
        if rule.optimizer == "sgd":
            if fixed and correction is not None:
                correction = torch.mul(correction, -rule.lr, out=self._correction)
            pull = self.pull.fill_(rule.lr * rule.proximal_mu) if fixed else None
            return SGD(shared, self.model.views(w), rule, start, correction, pull)
        if rule.own is not None:
            return Foreign(rule.own, self.model, values, rule, start, correction)
        if state is None:
            state = self._adam
            state.reset()
        state.gradient, state.scratch = self._adam.gradient, self._adam.scratch  # graphs write to the same gradient
        return Adam(values, rule, start, state, self.model.views(state.gradient), correction)
