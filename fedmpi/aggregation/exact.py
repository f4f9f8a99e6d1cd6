"""Sums of client updates: float32, or 64-bit fixed point, bit-identical for any order of the terms.

Updates are accumulated one by one into a flat buffer that the cluster then sums over the ranks. Metrics follow them in
the same reduction and are exact for any order of the ranks.

A metric is a fixed-point number with 40 fractional bits, stored as a whole part and a fraction: two int64 values in an
int64 buffer, nine limbs of 12 bits in a float32 one, where sums of limbs over up to 4096 ranks stay below 2**24.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.aggregation.weights import LARGEST, ClientWork, Weighing
from fedmpi.common.calling import refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.mpi import Cluster

FIXED_BITS = 40
CHUNK, DEVICE_CHUNK = 2**16, 2**24
"""Values converted to fixed point at once: on a CPU as many as the cache holds, on a GPU as many as memory allows."""
SHORT = 64
"""Number of terms summed in float32 before their sum is added in float64."""

FRACTION_BITS = 40
LIMB_BITS = 12
WHOLE_LIMBS = 5
FRACTION_LIMBS = 4
MOST_RANKS = 2 ** (24 - LIMB_BITS)
LEAST_EXACT = 2.0**-12
"""Smallest sum of judged weights that exact sums, in steps of 2**-40, still represent to about 1e-8 of it."""
LEAST_FLOAT = 1e-30
"""Smallest sum of judged weights whose terms are well above the least float32."""
Reducible = NDArray[np.float32] | Ints


class Adder(Protocol):
    """Receiver of the weighted updates of clients."""

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Add coefficient · vector for a client; `vector` is float32 (d,) and is not changed."""


class Accumulator(Adder, Protocol):
    """Running sum Σ coefficient · vector over the clients of one rank, in a buffer that is then reduced."""

    def reset(self) -> None:
        """Set the sum to zero."""

    def flush(self) -> None:
        """Write the sum to the buffer given at construction."""

    def to_update(self, reduced: Tensor) -> Tensor:
        """Return the buffers summed over the ranks, on the accumulator's device, as a vector of the model's type (d,).

        It may share memory with `reduced`, which other ranks read too: valid as long as `reduced`, and read-only.
        """


class FloatSum:
    """Float32 sum whose partial sums of 64 terms are added up in float64.

    A float32 sum of many small terms rounds each of them relative to the whole: a million terms of 1e-6 give 1.009.
    Here the error stays below 64 roundings of a partial sum, for any number of terms.
    """

    def __init__(self, buffer: NDArray[np.float32] | Tensor):
        self.tensor = torch.as_tensor(buffer)
        self._long: Tensor | None = None
        self._terms, self._carried = 0, False
        self._empty()

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        self.tensor.add_(vector, alpha=coefficient)
        self.added()

    def added(self) -> None:
        """Count a term that was added to `tensor`, which is set to zero after every 64."""
        self._zeros = False
        self._terms += 1
        if self._terms == SHORT:
            if self._long is None:
                self._long = torch.zeros_like(self.tensor, dtype=torch.float64)
            self._long.add_(self.tensor)
            self.tensor.zero_()
            self._terms, self._carried = 0, True

    def squared_norm(self) -> float:
        """Return the sum of the squared norms of the partial sums: finite only if the whole sum is."""
        squared = float(self.tensor.dot(self.tensor))
        if self._carried and self._long is not None:
            squared += float(self._long.dot(self._long))
        return squared

    def reset(self) -> None:
        if not self._zeros:  # nothing to reset on a server that trains no clients
            self._empty()

    def _empty(self) -> None:
        self.tensor.zero_()
        if self._long is not None:
            self._long.zero_()
        self._terms, self._carried, self._zeros = 0, False, True

    def scale(self, factor: float) -> None:
        """Multiply the current sum."""
        self.tensor.mul_(factor)
        if self._carried and self._long is not None:
            self._long.mul_(factor)

    def flush(self) -> None:
        if self._carried and self._long is not None:
            self.tensor.copy_(self._long.add_(self.tensor))
            self._long.zero_()
            self._terms, self._carried = 0, False

    def to_update(self, reduced: Tensor) -> Tensor:
        return reduced


class FixedPointSum:
    """Order-independent sum: every contribution is rounded to a multiple of 2**-FIXED_BITS and added as an integer.

    Integer addition is associative, so the sum is bit-identical for any order of clients and number of ranks, on a CPU
    and on a GPU.
    """

    def __init__(self, buffer: Ints | Tensor, ranks: int = 1):
        self._sum = torch.as_tensor(buffer)
        self._scale = 2.0**FIXED_BITS
        self._limit = 2.0**63 / ranks
        self._at_once = CHUNK if self._sum.device.type == "cpu" else DEVICE_CHUNK
        self._product = self._sum.new_empty(min(self._at_once, self._sum.numel()), dtype=torch.float64)
        self._rounded = torch.empty_like(self._product, dtype=torch.int64)
        self._bound: Tensor | float = 0.0  # Sum of the largest magnitudes
        self.reset()

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Add coefficient · vector; on a GPU, `flush` raises the errors, so that the host need not wait here."""
        factor = coefficient * self._scale
        largest = torch.linalg.vector_norm(vector, torch.inf)
        on_cpu = self._sum.device.type == "cpu"
        self._bound += (float(largest) if on_cpu else largest.double()) * abs(factor) + 0.5
        if on_cpu:
            self.flush()
        for part, own in zip(torch.split(self._sum, self._at_once), torch.split(vector, self._at_once), strict=True):
            product, rounded = self._product[: len(own)], self._rounded[: len(own)]
            product.copy_(own).mul_(factor).round_()
            part += rounded.copy_(product)

    def reset(self) -> None:
        self._sum.zero_()
        self._bound = 0.0

    def flush(self) -> None:
        """Reject a sum that is not finite or may have left the range; it is already in the buffer."""
        bound = float(self._bound)
        if not math.isfinite(bound):
            raise FloatingPointError("the update is not finite: training diverged; lower local.lr")
        if bound >= self._limit:
            raise OverflowError(
                f"the exact sum exceeds its range of ±{self._limit / self._scale:.3g}: the updates are too large for "
                "server.exact = true; lower local.lr or switch it off"
            )

    def to_update(self, reduced: Tensor) -> Tensor:
        update = torch.empty_like(reduced, dtype=torch.float32)
        for part, whole in zip(torch.split(update, self._at_once), torch.split(reduced, self._at_once), strict=True):
            part.copy_(whole.double().div_(self._scale))
        return update


class JudgedSum:
    """Accumulator that gets the weights' factor for every update before adding it to another accumulator.

    After `flush`, `weight` is the divisor of the sums: on rank 0 Σ h_k of all clients for exact sums, or 1, since float
    sums are divided there already; 0 on the other ranks.
    """

    def __init__(
        self,
        inner: Accumulator,
        weighing: Weighing,
        loss: Callable[[int, Tensor, int], float],
        cluster: Cluster,
        trainable: int,
    ):
        self.inner, self.weighing, self.loss, self.cluster = inner, weighing, loss, cluster
        self.trainable = trainable  # values of an update before its buffers
        self.weight = 0.0
        self._shares: list[float] = []

    def begin(self, plan: Plan, start: Tensor) -> None:
        """Set the round, its local learning rate and the global model (d,)."""
        self._plan, self._start = plan, start
        self.weighing.share(self.cluster.broadcast)

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Add a client's update (d,) times the factor of the weights."""
        norm = float(torch.linalg.vector_norm(vector[: self.trainable], dtype=torch.float64))
        loss = self.loss(client, self._start, self._plan.round)
        work = ClientWork(client, self._plan.round, coefficient, loss, norm, self._plan.rate_of(client))
        factor, share = self.weighing.after(work)
        self.inner.add(vector, factor, client)
        self._shares.append(share)

    def reset(self) -> None:
        self.inner.reset()
        self._shares = []

    def flush(self) -> None:
        """Divide a float sum by the sum of all ranks' shares; collective."""
        self.weighing.collect(self.cluster)
        gathered = self.cluster.gather(np.array(self._shares, np.float64))
        shares = None if gathered is None else np.concatenate(gathered)
        whole = None if shares is None else [np.array([math.fsum(shares), len(shares)])]
        total, participants = self.cluster.broadcast(whole)[0].tolist()
        if self._plan.normalize and participants:
            if total < (LEAST_FLOAT if isinstance(self.inner, FloatSum) else LEAST_EXACT):
                problem = (
                    f"shares that after() returned add up to {total:.3g}, too little to divide the updates' sum by"
                )
                raise refuse_result(self.weighing.part, problem, self._plan.round)
            if isinstance(self.inner, FloatSum):
                self.inner.scale(1 / total)
                total = 1.0
        self.weight = total if self.cluster.is_server else 0.0
        self.inner.flush()

    def to_update(self, reduced: Tensor) -> Tensor:
        return self.inner.to_update(reduced)


def check_ranks(ranks: int) -> None:
    """Reject a job whose metrics could not be summed exactly."""
    if ranks > MOST_RANKS:
        raise UserError(
            f"this job has {ranks} ranks, and sums over more than {MOST_RANKS} of them would not be exact. "
            f"Start at most {MOST_RANKS}"
        )


def metric_slots(count: int, dtype: np.dtype[np.float32] | np.dtype[np.int64]) -> int:
    """Return how many values of the buffer's type `count` metrics take: 2 each as int64, 9 each as float32."""
    return count * (2 if dtype == np.int64 else WHOLE_LIMBS + FRACTION_LIMBS)


def encode_metrics(values: Floats, dtype: np.dtype[np.float32] | np.dtype[np.int64]) -> Reducible:
    """Encode metrics so that their elementwise sum over up to 4096 ranks is exact."""
    values = np.asarray(values, np.float64)
    if not np.all(np.abs(values) < LARGEST):
        raise OverflowError(f"a metric is not finite or not below 2**50 in magnitude: {values}")
    whole = np.floor(values)
    fraction = np.rint((values - whole) * 2.0**FRACTION_BITS).astype(np.int64)
    parts = np.stack([whole.astype(np.int64), fraction], axis=1)
    if dtype == np.int64:
        return parts.ravel()
    limbs = np.concatenate([_limbs(parts[:, 0], WHOLE_LIMBS), _limbs(parts[:, 1], FRACTION_LIMBS)], axis=1)
    return limbs.astype(np.float32).ravel()


def decode_metrics(reduced: Reducible, count: int) -> Floats:
    """Decode the summed metrics from the summed `encode_metrics`, float64 (count,)."""
    table = reduced.reshape(count, -1).astype(np.int64)
    if reduced.dtype == np.int64:
        whole, fraction = table.T
    else:
        whole, fraction = _joined(table[:, :WHOLE_LIMBS]), _joined(table[:, WHOLE_LIMBS:])
    carried = whole + (fraction >> FRACTION_BITS)
    rest = fraction & (2**FRACTION_BITS - 1)
    sums: Floats = carried + rest / 2.0**FRACTION_BITS
    return sums


def _limbs(values: Ints, count: int) -> Ints:
    """Return base-4096 digits, lowest first; the last one contains the sign."""
    limbs = values[:, None] >> (LIMB_BITS * np.arange(count))
    limbs[:, :-1] &= 2**LIMB_BITS - 1
    return limbs


def _joined(limbs: Ints) -> Ints:
    joined: Ints = (limbs << (LIMB_BITS * np.arange(limbs.shape[1]))).sum(axis=1)
    return joined
