"""The batched engine: many clients train together, with their parameters stacked along a client dimension.

It needs a model with a batched form (`translation`). Results equal those of the sequential engine up to
floating-point rounding: batches, masks and updates are the same; only the order of additions differs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.errors import ComponentFailure, Divergence
from fedmpi.common.streams import Purpose
from fedmpi.common.types import Ints
from fedmpi.data.source import loaded_ahead
from fedmpi.local.batched.chain import StackedNet
from fedmpi.local.batched.first_layer import pays_off, steps_at_once
from fedmpi.local.batched.stack import BoundNet, Stack, client_by_client
from fedmpi.local.batched.translation import translate
from fedmpi.local.batched.update import StackOptimizer, stack_optimizer
from fedmpi.local.hooks import ClientHooks, deliver
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import (
    SMALL,
    ClientTask,
    LocalRule,
    RoundJob,
    WorkReport,
    batch_rows,
    check_loss,
    check_update,
    named_client,
    needs_order,
    schedule,
    step_count,
    task_size,
)

CACHE_BYTES = 16 << 20
DEVICE_SHARE = 0.25
LAID_OUT_BYTES = 32
"""Bytes per sample of a client in a step: its row and its weight in two types. All steps are laid out in advance."""
MOST_LAID_OUT = 1 << 30
"""Largest number of bytes for the laid-out batches of the batched clients; above it, fewer clients are batched."""
MOST_CLIENTS_CPU = 32
MOST_CLIENTS_DEVICE = 512
EMPTY = np.zeros(MOST_CLIENTS_DEVICE, np.int64)


@dataclass
class _Chunk:
    """Clients that are trained together."""

    tasks: Sequence[ClientTask]
    features: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    hooks: list[ClientHooks] = field(default_factory=list)  # empty without a stateful algorithm
    steps: list[int] = field(default_factory=list)  # number of steps of each client
    report: WorkReport = field(default_factory=WorkReport)


class BatchedEngine:
    """Engine that trains chunks of clients as batches."""

    name = "batched"

    def __init__(self, sequential: SequentialEngine, chunk: int | None = None):
        self.sequential, self.chunk = sequential, chunk
        self.model, self.source, self.streams = sequential.model, sequential.source, sequential.streams
        self.rank, self.observe, self.hooks = sequential.rank, sequential.observe, sequential.hooks
        self.net = translate(self.model.module, self.source.description, self.model.stacked_forms)
        self._stack: Stack | None = None

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum; a failing client is named by a ClientFailure."""
        self._job = job
        if self.model.personal:  # networks read the values in the module's own order
            job = replace(job, start=self.model.joined(job.start)[self.model.order])
        rule, start = job.rule, job.start
        sizes = {id(task): task_size(task, self.source.sizes) for task in tasks}
        report = WorkReport(clients=len(tasks), weight=float(sum(task.coefficient for task in tasks)))
        working = sorted(tasks, key=lambda task: (step_count(rule, sizes[id(task)]), sizes[id(task)]), reverse=True)
        rows = max(batch_rows(rule, sizes[id(task)]) for task in working)
        most = step_count(rule, sizes[id(working[0])])
        capacity = self.chunk or self.clients_at_once(rule, start, rows, most)
        capacity = max(1, min(capacity, MOST_LAID_OUT // (most * rows * LAID_OUT_BYTES)))
        chunks = -(-len(working) // capacity)
        together = -(-len(working) // chunks)
        if start.device.type != "cpu":
            rows, together = batch_rows(rule, few_shapes(rows)), min(few_shapes(together), capacity)
        with torch.no_grad():
            parts = ([working[i] for i in part] for part in np.array_split(np.arange(len(working)), chunks))
            for chunk in loaded_ahead(self._load, parts, start.device):
                report += self._train_chunk(chunk, together, rows, job)
                del chunk  # before the next but one is loaded
        return report

    def clients_at_once(self, rule: LocalRule, start: Tensor, rows: int = 0, steps: int = 0) -> int:
        """Return how many clients to train as one batch; on a GPU this is decided once per run."""
        model, sizes, extra = self.model, self.source.sizes, self._extra_values(rule, steps, start.device)
        if start.device.type != "cpu" and not model.clients_at_once:
            rows = few_shapes(max(batch_rows(rule, int(sizes.max())), min(SMALL, int(sizes.max()))))
            model.clients_at_once = chunk_size(self.net, rows, rule, start, extra, sizes)
        return model.clients_at_once or chunk_size(self.net, rows, rule, start, extra)

    def _prepare(self, capacity: int, rows: int, rule: LocalRule, start: Tensor) -> Stack:
        """Return the stack of earlier rounds if it is large enough, else a new one."""
        fused, kept, together = stack_optimizer(rule).fused, self._stack, capacity
        if kept is not None and (kept.fused, kept.dtype) == (fused, start.dtype):
            capacity, rows = max(capacity, kept.capacity), max(rows, kept.rows)
            if (capacity, rows) == (kept.capacity, kept.rows):
                kept.begin(start, together)
                return kept
        self._stack = kept = None
        if start.device.type != "cpu":
            gc.collect()  # frees its memory, also of traced networks, before the new stack takes more
        self._stack = stack = Stack(self.net, capacity, rows, fused, start.dtype, start.device, self.model.loss)
        stack.begin(start, together)
        return stack

    def _train_chunk(self, chunk: _Chunk, together: int, rows: int, job: RoundJob) -> WorkReport:
        """Train clients in one batch. If it fails, one at a time, so that the failing one is named."""
        try:
            stack = self._prepare(together, rows, job.rule, job.start)
            self._take_steps(stack, chunk, job)
            chunk.report.loss_sum = float(stack.losses.sum(dtype=torch.float64))
            check_loss(chunk.report.loss_sum, job.rule.lr)
            self._collect(stack, chunk, job)
        except (Divergence, ComponentFailure) as failure:
            self.sequential.name_failing(failure, chunk.tasks, self._job)
        return chunk.report

    def _load(self, tasks: Sequence[ClientTask]) -> _Chunk:
        started = time.perf_counter()
        loaded = [*map(self.sequential.load, tasks)]
        chunk = _Chunk(tasks, [x for x, _ in loaded], [y for _, y in loaded])
        chunk.report = WorkReport(samples=sum(map(len, chunk.labels)), load_seconds=time.perf_counter() - started)
        return chunk

    def _take_steps(self, stack: Stack, chunk: _Chunk, job: RoundJob) -> None:
        """Take all local steps of a chunk's clients."""
        rule, tasks, optimizer = job.rule, chunk.tasks, stack_optimizer(job.rule)
        batches = []
        for task, n in zip(tasks, map(len, chunk.labels), strict=True):
            generator = self._generator(Purpose.BATCH_ORDER, task, job.round) if needs_order(rule, n) else None
            batches.append(schedule(rule, n, generator))
            if self.hooks is not None:
                with named_client(task.client, self.rank):
                    chunk.hooks.append(self.hooks.open(task, n))
        sizes = [*map(len, chunk.labels)]
        timetable = Timetable(batches, sizes, stack.together, batch_rows(rule, few_shapes(max(sizes))))
        chunk.steps = timetable.steps_of_clients
        chunk.report.steps, chunk.report.loss_count = sum(chunk.steps), int(timetable.counts.sum())
        corrections = self._corrections(chunk) if self.hooks is not None and self.hooks.corrects else None
        apart = corrections is not None and self._kept_apart(rule, timetable.steps)
        read = stack.open(chunk.features, job.start, optimizer, corrections, apart)
        for number, client in enumerate(chunk.hooks if self.model.personal else ()):
            stack.fill(number, self.model.joined(self._job.start, client.personal)[self.model.order])
        finishes = optimizer.finishes or corrections is not None
        changes_all = finishes and stack.apart is None  # every step changes all weights
        head, together = self.net.head, 0
        if head is not None and not changes_all and stack.device.type == "cpu":
            together = steps_at_once(head.inputs, head.outputs, rule.batch_size, timetable.steps)
        if together:
            stack.look_ahead(read, timetable.orders(stack.device), max(timetable.most), together)
        products = None if stack.apart is None else stack.apart.products
        masks = [self._generator(Purpose.DROPOUT, task, job.round) for task in tasks] if rule.dropout else None
        feed = Feed(timetable, read, chunk.labels, stack.dtype, products, not together, masks, stack.weight)
        for step, active in enumerate(timetable.active):
            net = stack.bound(stack.computed(active), timetable.most[step])
            feed.fill(net, step)
            stack.begin_step(step)
            key = net.clients, net.rows, stack.step.keep, rule.dropout  # all that a graph does not read from memory
            stack.graphs.run(key, partial(net.step, *feed.weights(net, step)))
            for block in stack.blocks(active) if finishes else ():
                optimizer.finish(block, step + 1)
        stack.settle(chunk.steps)

    def gradients(
        self, clients: Ints, rows_of: Sequence[Ints | None], sizes: Ints, w: Tensor, most: int
    ) -> Iterator[tuple[Ints, Tensor]]:
        """Yield the gradients (k, d) of clients' mean losses at `w`, at most so many clients at a time.

        A step with target = 0 · target + 1 · gradient replaces each client's values by its gradient.
        """
        if not len(clients):
            return
        order, largest = np.argsort(-sizes, kind="stable"), int(sizes.max())
        together = min(self.clients_at_once(LocalRule(), w, largest), len(order), most)
        stack = self._prepare(few_shapes(together), few_shapes(largest), LocalRule(), w)
        for first in range(0, len(order), together):
            places = order[first : first + together].tolist()
            chunk = self._load([ClientTask(int(clients[place]), rows_of[place], 1.0) for place in places])
            rows = [*map(len, chunk.labels)]
            timetable = Timetable([[None]] * len(places), rows, stack.together, few_shapes(max(rows)))
            with torch.no_grad():
                read = stack.open(chunk.features, w, StackOptimizer())
                feed = Feed(timetable, read, chunk.labels, stack.dtype, weight=stack.weight)
                net = stack.bound(stack.computed(timetable.active[0]), timetable.most[0])
                feed.fill(net, 0)
                net.step(*feed.weights(net, 0))
            yield clients[places], stack.flat_gradients()

    def _corrections(self, chunk: _Chunk) -> Iterator[Tensor | None]:
        """Yield the clients' corrections; each is made when needed, so that it is still in the cache."""
        for task, client in zip(chunk.tasks, chunk.hooks, strict=True):
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
        head = self.net.head if self.model.device.type == "cpu" else None
        return head is not None and pays_off(head.inputs, head.outputs, rule, steps)

    def _generator(self, purpose: Purpose, task: ClientTask, round: int) -> np.random.Generator:
        return self.streams.generator(purpose, task.stream_round(round), task.client)

    def _collect(self, stack: Stack, chunk: _Chunk, job: RoundJob) -> None:
        """Add the changes to the sum: all at once, or one by one if an observer reads them or the sum is exact."""
        looked_at = self.observe is not None or (self.hooks is not None and self.hooks.finishes)
        if not looked_at and isinstance(job.total, FloatSum):
            coefficients = [task.coefficient for task in chunk.tasks]
            factors = torch.tensor(coefficients, dtype=stack.dtype, device=stack.device)
            job.total.added()
            if not stack.add_changes(factors, job.total.tensor).isfinite():
                raise Divergence(f"the weighted sum of {len(chunk.tasks)} updates is not finite")
            return
        for number, task in enumerate(chunk.tasks):
            with named_client(task.client, self.rank):
                client = chunk.hooks[number] if chunk.hooks else None
                change = stack.change_of(number)
                if client is not None and client.personal is not None:
                    whole = torch.empty_like(change)
                    whole[self.model.order] = change + job.start
                    client.personal.copy_(self.model.personal_of(whole))
                    change = whole[self.model.shared].sub_(self._job.start)
                check_update(change, job.rule.lr)
                deliver(task, change, job, self.observe, client, chunk.steps[number])


def few_shapes(count: int, up: bool = True) -> int:
    """Round a number up or down to one of 1, 2, 3, 4, 6, 8, 12, 16, …, so that few graphs serve all steps."""
    unit = 1 << max(0, (count - up).bit_length() - 2)
    return (count + up * (unit - 1)) // unit * unit


def chunk_size(net: StackedNet, rows: int, rule: LocalRule, start: Tensor, extra: int = 0, sizes: Ints = EMPTY) -> int:
    """Return how many clients to train as one batch.

    On a CPU: as many as keep parameters, optimizer state and activations within CACHE_BYTES. The minimum is two, or one
    if a single client's activations exceed CACHE_BYTES. More clients spread the cost of a call, but values outside the
    cache cost more. On a GPU: as many as fit in DEVICE_SHARE of its memory, whatever other processes use. Counted are
    two copies of the samples of the largest clients (of `sizes`), one of the next ones, and the vectors of all words.
    """
    copies = 1 if stack_optimizer(rule).fused else 5
    activations = start.element_size() * rows * net.values_per_row
    client_bytes = start.element_size() * (copies * net.stack_size + extra) + activations
    if start.device.type == "cpu":
        least = 2 if activations <= CACHE_BYTES else 1
        return int(np.clip(CACHE_BYTES // client_bytes, least, MOST_CLIENTS_CPU))
    if net.embedding is not None:
        client_bytes += start.element_size() * (copies + 1) * net.embedding.weight.size
    _, memory = torch.cuda.mem_get_info(start.device)
    samples = -3 * start.element_size() * math.prod(net.description.feature_shape) * np.sort(-np.append(sizes, EMPTY))
    fitting = np.searchsorted(np.cumsum(client_bytes + samples), DEVICE_SHARE * memory, "right")
    return few_shapes(int(np.clip(fitting, 1, MOST_CLIENTS_DEVICE)), up=False)


class Timetable:
    """Steps and batch sizes of the clients of a chunk, which are sorted by steps, longest first.

    `batches` are the local samples of each step of every client, None = all of them; `sizes` the clients' samples.
    With `fixed`, all batches have one size, at least `rows`, and there are that many clients; added ones take no step.
    """

    def __init__(self, batches: list[list[Ints | None]], sizes: Sequence[int], fixed: int = 0, rows: int = 0):
        self.steps = len(batches[0])
        self.batches = [
            [np.arange(size) if rows is None else rows for rows in own]
            for own, size in zip(batches, sizes, strict=True)
        ]
        self.fixed, clients = bool(fixed), max(fixed, len(batches))
        self.counts = np.zeros((self.steps, clients), np.int64)  # (T, K): samples in the step, 0 when finished
        for client, own in enumerate(self.batches):
            self.counts[: len(own), client] = list(map(len, own))
        self.active: list[int] = np.count_nonzero(self.counts, axis=1).tolist()  # the first so many clients take a step
        self.steps_of_clients: list[int] = np.count_nonzero(self.counts, axis=0).tolist()
        most = self.counts.max(axis=1)
        self.most: list[int] = (np.full_like(most, max(most.max(), rows)) if fixed else most).tolist()  # of a batch

    def filled(self, firsts: Sequence[int]) -> Tensor:
        """Return the samples of all steps, counted from each client's first, which fills up smaller batches.

        int64 (T, K, B).
        """
        index = np.zeros((*self.counts.shape, max(self.most)), np.int64)
        index[:, : len(firsts)] = np.asarray(firsts)[:, None]
        for client, own in enumerate(self.batches):
            for step, rows in enumerate(own):
                index[step, client, : len(rows)] += rows
        return torch.from_numpy(index)

    def orders(self, device: torch.device) -> list[Tensor]:
        """Return each client's own samples of all its steps, as `filled`: int64 (T_j · B,)."""
        order = self.filled([0] * len(self.batches)).to(device)
        return [own[: len(steps)].reshape(-1) for own, steps in zip(order.unbind(1), self.batches, strict=True)]


class Feed:
    """Filler of the buffers of a bound network with the batches, weights and masks of a step.

    `features` and `labels` have one tensor per client. `products` are those of `KeptApart`; `samples` is False if the
    first layer does not read a step's samples. `generators` are the streams of the clients' masks; None disables
    dropout. `weight` is a factor of all weights.
    """

    def __init__(
        self,
        timetable: Timetable,
        features: list[Tensor],
        labels: list[Tensor],
        dtype: torch.dtype,
        products: Tensor | None = None,
        samples: bool = True,
        generators: Sequence[np.random.Generator] | None = None,
        weight: float = 1.0,
    ):
        self.timetable, self._products, self._generators = timetable, products, generators
        joined, counts = not client_by_client(features[0]), timetable.counts
        self._all_labels = torch.cat(labels)
        self._joined = torch.cat(features) if joined and samples else None
        self._features = features if samples and not joined else None
        device = self._all_labels.device
        self._positions = timetable.filled(np.cumsum([0, *map(len, labels[:-1])]).tolist()).to(device)
        counted = (np.arange(max(timetable.most)) < counts[:, :, None]).astype(np.float64)
        weights = counted * (weight / np.maximum(counts, 1))[:, :, None]
        self._ragged = [bool((row[row > 0] != row.max()).any()) for row in counts]
        self._counted = torch.from_numpy(counted).unsqueeze(3).to(device=device, dtype=dtype)
        self._weights = torch.from_numpy(weights).unsqueeze(3).to(device=device, dtype=dtype)
        self._given: dict[BoundNet, bytes] = {}  # sizes of the batches that a network's fixed weights are for

    def weights(self, net: BoundNet, step: int) -> tuple[Tensor | float, Tensor | None]:
        """Return weights (k, b, 1) or the one weight of all samples, and a mask of the real samples (None = all).

        A sample weighs 1 / (samples of the client's batch), padding 0. On a GPU they are always in the same memory.
        """
        if self.timetable.fixed:
            sizes = self.timetable.counts[step, : net.clients].tobytes()
            if self._given.get(net) != sizes:
                self._given[net] = sizes
                net.given[0].copy_(self._weights[step, : net.clients])
                net.given[1].copy_(self._counted[step, : net.clients])
            return net.given[0], net.given[1]
        if not self._ragged[step]:
            return 1.0 / net.rows, None
        return self._weights[step, : net.clients, : net.rows], self._counted[step, : net.clients, : net.rows]

    def fill(self, net: BoundNet, step: int) -> None:
        """Fill in the samples, labels and masks of a step; a client's stream serves the layers in order."""
        positions = self._positions[step, : net.clients, : net.rows].reshape(-1)
        torch.index_select(self._all_labels, 0, positions, out=net.flat_labels)
        if self._products is not None and net.first_output is not None:
            torch.index_select(self._products, 0, positions, out=net.first_output)
        if self._joined is not None:
            net.read_all(self._joined, positions)
        elif self._features is not None:
            for client in range(net.clients):
                rows = self.timetable.batches[client][step]
                net.read(client, self._features[client], torch.from_numpy(rows))
        counts = self.timetable.counts[step, : net.clients].tolist()
        for dropout in net.dropouts:
            if self._generators is None:
                dropout.keep_all()
                continue
            for client, count in enumerate(counts):
                if count:
                    dropout.draw(client, count, self._generators[client])
            dropout.send()
