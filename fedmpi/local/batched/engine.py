"""The batched engine: many clients train together, with their parameters stacked along a client dimension.

It needs a model with a batched form (`translation`). Results equal those of the sequential engine up to
floating-point rounding: batches, masks and updates are the same; only the order of additions differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.errors import ClientFailure, ComponentFailure, Divergence
from fedmpi.common.streams import Purpose
from fedmpi.common.types import Ints
from fedmpi.local.batched.chain import StackedNet
from fedmpi.local.batched.feed import Feed, Timetable
from fedmpi.local.batched.first_layer import pays_off, steps_at_once
from fedmpi.local.batched.stack import Stack
from fedmpi.local.batched.translation import translate
from fedmpi.local.batched.update import StackOptimizer, stack_optimizer
from fedmpi.local.failures import check_loss, halved, named_client, ran_out
from fedmpi.local.hooks import ClientHooks, deliver
from fedmpi.local.schedule import batch_rows, needs_order, schedule, step_count
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, Job, LocalRule, WorkReport, task_size

CACHE_BYTES = 16 << 20
DEVICE_SHARE = 0.25
LAID_OUT_BYTES = 32
"""Bytes per sample of a client in a step: its row and its weight in two types. All steps are laid out in advance."""
MOST_LAID_OUT = 1 << 30
"""Largest number of bytes for the laid-out batches of the batched clients; above it, fewer clients are batched."""
MOST_CLIENTS_CPU = 32
MOST_CLIENTS_DEVICE = 512


class BatchedEngine:
    """Engine that trains chunks of clients as batches."""

    name = "batched"

    def __init__(self, sequential: SequentialEngine, chunk: int | None = None):
        self.sequential, self.chunk, self._summing = sequential, chunk, False
        self.model, self.source, self.streams = sequential.model, sequential.source, sequential.streams
        self.rank, self.observe, self.hooks = sequential.rank, sequential.observe, sequential.hooks
        self.net = translate(self.model.module, self.source.description, self.model.stacked_forms)
        self._stack: Stack | None = None

    def train(self, tasks: Sequence[ClientTask], job: Job) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum.

        Raises
        ------
        ClientFailure
            Reading a client's samples failed, or a loss or an update is not finite; the message names the client.
        """
        rule, start = job.rule, job.start
        sizes = {id(task): task_size(task, self.source.sizes) for task in tasks}
        report = WorkReport(clients=len(tasks), weight=float(sum(task.coefficient for task in tasks)))
        working = [task for task in tasks if step_count(rule, sizes[id(task)])]
        working.sort(key=lambda task: (step_count(rule, sizes[id(task)]), sizes[id(task)]), reverse=True)
        if not working:
            return report
        rows = max(batch_rows(rule, sizes[id(task)]) for task in working)
        most = step_count(rule, sizes[id(working[0])])
        capacity = self.chunk or chunk_size(self.net, rows, rule, start, self._extra_values(rule, most, start.device))
        capacity = max(1, min(capacity, MOST_LAID_OUT // (most * rows * LAID_OUT_BYTES)))
        with torch.no_grad():
            while working:
                done, capacity = self._train_chunks(working, capacity, rows, job, report)
                working = working[done:]
        return report

    def _train_chunks(
        self, tasks: list[ClientTask], capacity: int, rows: int, job: Job, report: WorkReport
    ) -> tuple[int, int]:
        """Train tasks in chunks of about equal size; return how many are done and how many fit into one chunk.

        If the device runs out of memory, not all are done and later chunks are smaller.
        """
        chunks, done = -(-len(tasks) // capacity), 0
        together = -(-len(tasks) // chunks)
        stack: Stack | None = None
        try:
            stack = self._prepare(together, rows, job.rule, job.start)
            for part in np.array_split(np.arange(len(tasks)), chunks):
                self._summing, together = False, len(part)
                report += self._train_chunk(stack, [tasks[i] for i in part], job)
                done += len(part)
            return done, capacity
        except (torch.OutOfMemoryError, ClientFailure) as error:
            if not ran_out(error) or self._summing or together == 1:
                raise
        self._stack = stack = None
        self.chunk = halved(together, "batched clients")
        return done, self.chunk

    def _prepare(self, capacity: int, rows: int, rule: LocalRule, start: Tensor) -> Stack:
        """Return the stack of earlier rounds if it is large enough, else a new one."""
        fused, kept = stack_optimizer(rule).fused, self._stack
        if kept is not None and (kept.fused, kept.dtype) == (fused, start.dtype):
            if kept.capacity >= capacity and kept.rows >= rows:
                kept.begin(start)
                return kept
            capacity, rows = max(capacity, kept.capacity), max(rows, kept.rows)
        self._stack = stack = Stack(self.net, capacity, rows, fused, start.dtype, start.device, self.model.loss)
        stack.begin(start)
        return stack

    def _train_chunk(self, stack: Stack, tasks: list[ClientTask], job: Job) -> WorkReport:
        started = time.perf_counter()
        features, labels = self._load(tasks)
        report = WorkReport(samples=sum(map(len, labels)), load_seconds=time.perf_counter() - started)
        timetable = self._timetable(tasks, [len(y) for y in labels], job)
        report.steps, report.loss_count = int(np.count_nonzero(timetable.counts)), int(timetable.counts.sum())
        clients = self._open(tasks, labels)
        try:
            self._take_steps(stack, timetable, tasks, features, labels, clients, job)
            report.loss_sum = float(stack.losses.sum(dtype=torch.float64))
            check_loss(report.loss_sum, job.rule.lr)
            if self.sequential.on_divergence.drops:
                stack.check_changes(job.rule.lr)
        except (Divergence, ComponentFailure) as failure:
            again = self.sequential.one_by_one(failure, tasks, job)
            again.clients -= len(tasks)  # `train` counts them
            again.weight -= sum(task.coefficient for task in tasks)
            return again
        self._summing = True
        if self._collect(stack, tasks, clients, timetable, job):
            return report
        failure = Divergence(f"the weighted sum of {len(tasks)} updates is not finite")
        return self.sequential.one_by_one(failure, tasks, job)

    def _load(self, tasks: Sequence[ClientTask]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the samples and the labels of each client."""
        features, labels = [], []
        for task in tasks:
            with named_client(task.client, self.rank):
                x, y = self.source.load(task.client, task.rows)
                features.append(x)
                labels.append(y)
        return features, labels

    def _take_steps(
        self,
        stack: Stack,
        timetable: Timetable,
        tasks: list[ClientTask],
        features: list[Tensor],
        labels: list[Tensor],
        clients: list[ClientHooks | None],
        job: Job,
    ) -> None:
        rule, optimizer = job.rule, stack_optimizer(job.rule)
        corrections = self._corrections(tasks, clients) if self.hooks is not None and self.hooks.corrects else None
        apart = corrections is not None and self._kept_apart(rule, timetable.steps)
        read = stack.open(features, job.start, optimizer, corrections, apart)
        finishes = optimizer.finishes or corrections is not None
        passes = finishes and stack.apart is None  # every step changes all weights
        by_step = passes or stack.device.type != "cpu"
        head = self.net.head
        together = 0
        if head is not None and not by_step:
            together = steps_at_once(head.inputs, head.outputs, rule.batch_size, timetable.steps)
        if together:
            stack.look_ahead(read, timetable.orders(stack.device), max(timetable.most), together)
        products = None if stack.apart is None else stack.apart.products
        masks = [self._generator(Purpose.DROPOUT, task, job.round) for task in tasks] if rule.dropout else None
        feed = Feed(timetable, read, labels, stack.dtype, products, not together, masks)
        for step in range(timetable.steps):
            net = stack.bound(timetable.active[step], timetable.most[step])
            feed.fill(net, step)
            stack.begin_step(step)
            net.step(*feed.weights(net, step))
            for block in stack.blocks(net.clients) if finishes else ():
                optimizer.finish(block, step + 1)
        stack.settle(timetable.steps_of_clients)

    def gradients(
        self, clients: Ints, rows_of: Sequence[Ints | None], sizes: Ints, w: Tensor, most: int
    ) -> Iterator[tuple[Ints, Tensor]]:
        """Yield the gradients (k, d) of clients' mean losses at `w`, at most so many clients at a time.

        A step with target = 0 · target + 1 · gradient replaces each client's values by its gradient.
        """
        if not len(clients):
            return
        order, largest = np.argsort(-sizes, kind="stable"), int(sizes.max())
        chunk = min(chunk_size(self.net, largest, LocalRule(), w), len(order), most)
        stack = self._prepare(chunk, largest, LocalRule(), w)
        for first in range(0, len(order), chunk):
            places = order[first : first + chunk].tolist()
            features, labels = self._load([ClientTask(int(clients[place]), rows_of[place], 1.0) for place in places])
            timetable = Timetable([[None]] * len(places), [len(y) for y in labels])
            with torch.no_grad():
                feed = Feed(timetable, stack.open(features, w, StackOptimizer()), labels, stack.dtype)
                net = stack.bound(timetable.active[0], timetable.most[0])
                feed.fill(net, 0)
                net.step(*feed.weights(net, 0))
            yield clients[places], stack.flat_gradients()

    def _open(self, tasks: list[ClientTask], labels: list[Tensor]) -> list[ClientHooks | None]:
        """Open the algorithm's hooks for each of the clients; None for each without a stateful algorithm."""
        if self.hooks is None:
            return [None] * len(tasks)
        clients: list[ClientHooks | None] = []
        for task, own in zip(tasks, labels, strict=True):
            with named_client(task.client, self.rank):
                clients.append(self.hooks.open(task, len(own)))
        return clients

    def _corrections(self, tasks: list[ClientTask], clients: list[ClientHooks | None]) -> Iterator[Tensor | None]:
        """Yield the clients' corrections; each is made when needed, so that it is still in the cache."""
        for task, client in zip(tasks, clients, strict=True):
            assert client is not None
            with named_client(task.client, self.rank):
                yield client.correction
            del client.correction

    def _extra_values(self, rule: LocalRule, steps: int, device: torch.device) -> int:
        """Count the values per client besides its parameters: on a CPU those that steps read, else all vectors."""
        if self.hooks is None:
            return 0
        size = self.net.stack_size
        if device.type != "cpu":
            return (int(self.hooks.corrects) + len(self.hooks.client_state)) * size
        if not self.hooks.corrects:
            return 0
        return size - self.net.slots[0].size if self._kept_apart(rule, steps) else size

    def _kept_apart(self, rule: LocalRule, steps: int) -> bool:
        """Check whether the first layer's weights are stored in two parts while corrections move them."""
        head = self.net.head
        return head is not None and pays_off(head.inputs, head.outputs, rule, steps)

    def _timetable(self, tasks: list[ClientTask], sizes: list[int], job: Job) -> Timetable:
        batches = []
        for task, n in zip(tasks, sizes, strict=True):
            drawn = needs_order(job.rule, n)
            generator = self._generator(Purpose.BATCH_ORDER, task, job.round) if drawn else None
            batches.append(schedule(job.rule, n, generator))
        return Timetable(batches, sizes)

    def _generator(self, purpose: Purpose, task: ClientTask, round: int) -> np.random.Generator:
        return self.streams.generator(purpose, task.stream_round(round), task.client)

    def _collect(
        self, stack: Stack, tasks: list[ClientTask], clients: list[ClientHooks | None], timetable: Timetable, job: Job
    ) -> bool:
        """Add the changes to the sum: all at once, or one by one if an observer reads them or the sum is exact.

        Return False if the sum of all at once is not finite.
        """
        looked_at = self.observe is not None or (self.hooks is not None and self.hooks.finishes)
        if not looked_at and isinstance(job.total, FloatSum):
            coefficients = torch.tensor([task.coefficient for task in tasks], dtype=stack.dtype, device=stack.device)
            job.total.added()
            return bool(stack.add_changes(coefficients, job.total.tensor).isfinite())
        for number, (task, client) in enumerate(zip(tasks, clients, strict=True)):
            with named_client(task.client, self.rank):
                steps = timetable.steps_of_clients[number]
                deliver(task, stack.change_of(number), job, self.observe, client, steps)
        return True


def chunk_size(net: StackedNet, rows: int, rule: LocalRule, start: Tensor, extra: int = 0) -> int:
    """Return how many clients to train as one batch.

    On a CPU: as many as keep parameters, optimizer state and activations within CACHE_BYTES. The minimum is two, or one
    if a single client's activations exceed CACHE_BYTES. More clients spread the cost of a call, but values outside the
    cache cost more. On a GPU: as many as fit in DEVICE_SHARE of the free memory.
    """
    copies = 1 if rule.optimizer == "sgd" else 5
    activations = start.element_size() * rows * net.values_per_row
    client_bytes = start.element_size() * (copies * net.stack_size + extra) + activations
    if start.device.type == "cpu":
        least = 2 if activations <= CACHE_BYTES else 1
        return int(np.clip(CACHE_BYTES // client_bytes, least, MOST_CLIENTS_CPU))
    free, _ = torch.cuda.mem_get_info(start.device)
    return int(np.clip(DEVICE_SHARE * free // client_bytes, 1, MOST_CLIENTS_DEVICE))
