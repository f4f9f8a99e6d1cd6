"""Transport of a client's update to the server: rounded, quantized or sparsified, with its size in bits.

Rounding is stochastic, hence unbiased. The client can keep the losses of a biased transport and send them later (error
feedback: Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result, result_tensor
from fedmpi.common.decorators import compressor
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmpi.config import Config
    from fedmpi.mpi import Cluster
else:
    torch = Later("torch")

BUCKET = 512
"""Number of values that share a scale in 8-bit updates, as in QSGD (Alistarh et al. 2017)."""
LEVELS = 127
RESIDUALS = ("transport.clients", "transport.residuals")
"""Names of the error feedback's tensors in a checkpoint: clients int64 (c,) and their residuals (c · d,)."""
MANTISSA = {"float16": 10, "bfloat16": 7}
LOWEST_EXPONENT = {"float16": -14, "bfloat16": -119}
LARGEST_FLOAT16 = 65504.0


def _int8_bits(values: int) -> int:
    return 8 * values + 32 * -(-values // BUCKET)


def _kept(values: int, fraction: float) -> int:
    """Return how many of d values top-k sends."""
    return max(1, math.ceil(fraction * values))


def _top_k_bits(values: int, *, fraction: float) -> int:
    return _kept(values, fraction) * (32 + max(1, (values - 1).bit_length()))


@register("compressor", "none", bits=32)
def none(update: Tensor, generator: np.random.Generator) -> None:
    """Updates arrive as float32."""


@compressor(name="float16", bits=16)
def float16(update: Tensor, generator: np.random.Generator) -> None:
    """float16, rounded at random without bias."""
    round_to_format(update, _draws(update, generator), "float16")


@compressor(name="bfloat16", bits=16)
def bfloat16(update: Tensor, generator: np.random.Generator) -> None:
    """bfloat16, rounded at random without bias."""
    round_to_format(update, _draws(update, generator), "bfloat16")


@compressor(name="int8", bits=_int8_bits)
def int8(update: Tensor, generator: np.random.Generator) -> None:
    """255 levels per bucket of 512 values, rounded at random without bias."""
    quantize(update, _draws(update, generator))


@compressor(name="top-k", bits=_top_k_bits)
def top_k_values(
    update: Tensor, generator: np.random.Generator, *, fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
) -> None:
    """Send only the largest values, with their positions (top-k sparsification, Stich et al. 2018).

    In a tie, values at lower positions are kept. Rounding can decide between two nearly equal values: the results for
    two updates that differ by rounding may differ by the smallest value kept.

    Parameters
    ----------
    fraction : float
        Share of the values that is sent.
    """
    magnitudes, count = update.abs(), _kept(update.numel(), fraction)
    smallest = torch.topk(magnitudes, count, sorted=False).values.min()
    kept = magnitudes > smallest
    kept[torch.nonzero(magnitudes == smallest).squeeze(1)[: count - int(kept.sum())]] = True
    update.masked_fill_(~kept, 0.0)


def _draws(update: Tensor, generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(generator.random(update.numel(), np.float32)).to(update.device)


class Transport:
    """Lossy transport of the clients' updates to the server."""

    def __init__(self, chosen: Component, streams: Streams):
        self.part, self.compress, self.streams = chosen, chosen.make(), streams
        keeps = chosen.services is not None and chosen.services.error_feedback
        self.residuals: dict[int, Tensor] | None = {} if keeps else None

    def send(self, round: int, client: int, update: Tensor) -> Tensor:
        """Turn a client's Δ (d,) into the received update, in place, and return it."""
        if self.residuals is None:
            return self._arrive(round, client, update)
        residual = self.residuals.get(client)
        if residual is None:
            residual = self.residuals[client] = torch.zeros_like(update)
        residual.add_(update)
        update.copy_(residual)
        residual.sub_(self._arrive(round, client, update))
        return update

    def _arrive(self, round: int, client: int, update: Tensor) -> Tensor:
        generator = self.streams.generator(Purpose.TRANSPORT, round, client)
        found = what_arrives(self.part, self.compress, update, generator, round, client)
        if self.part.foreign and not math.isfinite(float(found.sum(dtype=torch.float64))):
            raise refuse_result(self.part, "returned an update that is not finite. Return finite values", round, client)
        return found

    def gather_state(self, cluster: Cluster) -> dict[str, Tensor]:
        """Gather the residuals of all ranks' clients on rank 0, for a checkpoint; collective if there are residuals."""
        if self.residuals is None:
            return {}
        held = self.residuals
        values = torch.cat(list(held.values())).cpu().numpy() if held else np.empty(0, np.float32)
        gathered = [cluster.gather(part) for part in (np.fromiter(held, np.int64, len(held)), values)]
        named = zip(RESIDUALS, gathered, strict=True)
        return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in named if parts is not None}

    def load(self, state: Mapping[str, Tensor], owned: range) -> None:
        """Restore the residuals of a checkpoint for this rank's clients."""
        if self.residuals is None or not all(name in state for name in RESIDUALS):
            return
        clients, values = (state[name] for name in RESIDUALS)
        rows = zip(clients.tolist(), values.view(len(clients), -1), strict=True)
        self.residuals = {client: row.clone() for client, row in rows if client in owned}


def what_arrives(
    part: Component,
    change: Callable[[Tensor, np.random.Generator], Any],
    update: Tensor,
    generator: np.random.Generator,
    round: int,
    client: int,
) -> Tensor:
    """Return the update (d,) that a component changes in place, or returns instead; in place."""
    with calling(part, round, client) if part.foreign else nullcontext():
        found = change(update, generator)
    return update if found is None or found is update else update.copy_(result_tensor(part, found, update.shape, round))


def upload_bits(chosen: Component, values: int) -> Fraction:
    """Return bits per value of an update of d values, positions and scales included."""
    bits = chosen.marks.get("bits", 32)
    if not callable(bits):
        return Fraction(bits)
    with calling(chosen):
        return Fraction(bits(values, **chosen.options)) / values


def keeps_residuals(config: Config) -> bool:
    """Check whether clients keep what was lost of their updates (`compression.error_feedback`)."""
    return bool(config.compression.values.get("error_feedback"))


def quantize(update: Tensor, draws: Tensor) -> Tensor:
    """Round to 255 levels between −s and s, in place; s is the largest magnitude among BUCKET neighbors."""
    whole = update.numel() // BUCKET * BUCKET
    for part, uniform in ((update[:whole], draws[:whole]), (update[whole:], draws[whole:])):
        if part.numel():
            rows = part.view(-1, min(BUCKET, part.numel()))
            step = rows.abs().amax(1, keepdim=True).div_(LEVELS)
            step[step == 0] = 1
            _round_at_random(rows, step, uniform.view_as(rows))
    return update


def round_to_format(update: Tensor, draws: Tensor, kind: Literal["float16", "bfloat16"]) -> Tensor:
    """Round to one of the two neighboring values of a 16-bit float format, in place."""
    if kind == "float16" and float(torch.linalg.vector_norm(update, torch.inf)) > LARGEST_FLOAT16:
        raise FloatingPointError('a value of the update exceeds the range of float16. Set compression = "bfloat16"')
    exponent = torch.frexp(update).exponent.sub_(1).clamp_(min=LOWEST_EXPONENT[kind]).sub_(MANTISSA[kind])
    _round_at_random(update, torch.ldexp(torch.ones_like(update), exponent), draws)
    return update


def _round_at_random(values: Tensor, step: Tensor, draws: Tensor) -> None:
    """Round to a multiple of `step`, up or down so that the mean is the value itself; in place."""
    values.div_(step)
    lower = values.floor()
    values.sub_(lower)
    lower.add_(draws < values)
    torch.mul(lower, step, out=values)
