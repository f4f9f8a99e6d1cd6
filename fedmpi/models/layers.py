"""Dropout with masks per client instead of torch's, and a faster convolution over words.

Masks are drawn from the stream (DROPOUT, round, client) and never from torch, layer by layer and step by step, so that
every engine gives a client the same masks. They are made from raw 64-bit words (torch's bernoulli_ takes 12 % of a step
of a small CNN on a CPU).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedmpi.common.types import Bytes

Probability = Annotated[float, Field(ge=0, lt=1)]
"""Type of a model's option `dropout`."""

_HALVES = 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)
"""Mask values for the eight bits of every byte at p = 1/2, float32 (256, 8)."""


def draw_mask(
    generator: np.random.Generator, rows: int, units: int, p: float, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return a dropout mask, float32 (rows, units): 1/(1 − p) where `draw_kept` keeps a unit, else 0."""
    if out is None:
        out = np.empty((rows, units), np.float32)
    if p != 0.5:
        return np.multiply(draw_kept(generator, rows, units, p), np.float32(1 / (1 - p)), out=out)
    count = rows * units
    drawn, whole, flat = _raw_bytes(generator, -(-count // 8)), count // 8, out.reshape(-1)
    np.take(_HALVES, drawn[:whole], axis=0, out=flat[: 8 * whole].reshape(whole, 8), mode="clip")
    if count % 8:
        flat[8 * whole :] = _HALVES[drawn[whole], : count % 8]
    return out


def draw_kept(generator: np.random.Generator, rows: int, units: int, p: float) -> NDArray[np.bool_]:
    """Draw the units that dropout keeps, bool (rows, units), from whole 64-bit words of the generator.

    It uses one bit per unit for p = 1/2, a byte if p is a multiple of 1/256, else 16 bits (p is then met to 2**-17).
    """
    count = rows * units
    if p == 0.5:
        kept = np.unpackbits(_raw_bytes(generator, -(-count // 8)), count=count).view(np.bool_)
    elif (p * 256).is_integer():
        kept = _raw_bytes(generator, count)[:count] >= np.uint8(p * 256)
    else:
        kept = _raw_bytes(generator, 2 * count).view("<u2")[:count] >= np.uint16(min(round(p * 65536), 65535))
    return kept.reshape(rows, units)


def _raw_bytes(generator: np.random.Generator, count: int) -> Bytes:
    """Return at least `count` bytes: whole words, little-endian."""
    words: NDArray[np.uint64] = generator.bit_generator.random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)


Source = Callable[[int, int, float], Tensor]
"""source(rows, units, p) returns the next mask, float32 (rows, units) on the CPU: 0 or 1/(1 − p)."""


def no_masks(rows: int, units: int, p: float) -> Tensor:
    """Disable dropout while the model stays in training mode."""
    return torch.ones(rows, units)


def client_masks(stream: Callable[[], np.random.Generator]) -> Source:
    """Return the source of one client's masks; the stream is opened at the first one."""
    opened = cache(stream)
    return lambda rows, units, p: torch.from_numpy(draw_mask(opened(), rows, units, p))


def joined_masks(generators: Sequence[np.random.Generator], counts: Sequence[int]) -> Source:
    """Return the source for clients whose samples are concatenated in one batch, each with its own stream."""

    def source(rows: int, units: int, p: float) -> Tensor:
        if rows != sum(counts):
            raise RuntimeError(
                f"dropout saw {rows} rows where the batch has {sum(counts)}: its first axis must be the samples"
            )
        parts = [draw_mask(generator, count, units, p) for generator, count in zip(generators, counts, strict=True)]
        return torch.from_numpy(np.concatenate(parts))

    return source


class SentMasks:
    """Source of dropout masks that sends all masks of a step to a device before the step, in one copy of bytes.

    A trial of the model finds which masks a step needs. Those of steps with equally many samples are in the same memory
    if CUDA graphs require it. Custom objectives and modules that are not plain may request others, sent one by one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.requests: list[tuple[float, float]] = []  # of a step: values per sample, and p
        self._memory: dict[int, Tensor] = {}  # bytes on the device by the number of samples

    def open(self, streams: Sequence[np.random.Generator], counts: Sequence[int] = ()) -> Source:
        """Return the source of one client's masks, or with counts of those for joined samples; see `joined_masks`."""
        self._streams, self._counts = streams, counts or [1]
        self._coming: list[tuple[tuple[int, float], Tensor]] = []  # masks that the step has not used
        self._used: list[tuple[int, float]] = []
        if counts:
            self.prepare(counts)
        return self

    def prepare(self, counts: Sequence[int], graph: bool = False) -> None:
        """Send the masks of the next step, perhaps a graph, for these numbers of samples, while the device computes."""
        self._rewind()
        self._counts, self._used, samples = counts, [], sum(counts)
        self._before = [] if graph else [stream.bit_generator.state for stream in self._streams]
        requests = [(round(samples * values), p) for values, p in self.requests]
        sizes = [values for values, _ in requests]
        drawn = torch.empty(sum(sizes), dtype=torch.bool, pin_memory=self.device.type == "cuda")
        for request, part in zip(requests, torch.split(drawn, sizes), strict=True):
            part.copy_(self._drawn(*request))
        kept = self._memory.get(samples)
        if kept is None:
            kept = torch.empty_like(drawn, device=self.device)
        if graph:
            self._memory[samples] = kept
        kept.copy_(drawn, non_blocking=True)
        self._coming = [*zip(requests, torch.split(kept, sizes), strict=True)]

    def _drawn(self, values: int, p: float) -> Tensor:
        """Draw which of so many values are kept, bool (values,)."""
        counts = [values * count // sum(self._counts) for count in self._counts]
        parts = [draw_kept(stream, 1, count, p) for stream, count in zip(self._streams, counts, strict=True)]
        return torch.from_numpy(np.concatenate(parts, axis=None))

    def _rewind(self) -> None:
        """Forget the masks that the step did not use: the streams continue after those that it used."""
        if self._coming and self._before:  # a graph uses all without requests
            for stream, state in zip(self._streams, self._before, strict=True):
                stream.bit_generator.state = state
            for request in self._used:
                self._drawn(*request)
        self._coming = []

    def __call__(self, rows: int, units: int, p: float) -> Tensor:
        request = rows * units, p
        if self._coming and self._coming[0][0] != request:
            self._rewind()
        kept = self._coming.pop(0)[1] if self._coming else self._drawn(*request).to(self.device)
        self._used.append(request)
        return kept.view(rows, units) * float(np.float32(1 / (1 - p)))  # as `draw_mask`


class Masks:
    """Source of masks, shared by all dropout layers of one model; an engine sets it before it runs the model."""

    def __init__(self) -> None:
        self.source: Source | None = None

    @contextmanager
    def given_by(self, source: Source | None) -> Iterator[None]:
        """Use this source for the model within the context."""
        before, self.source = self.source, source
        try:
            yield
        finally:
            self.source = before


class Dropout(nn.Module):
    """Layer that zeroes values with probability p in training mode and scales the others by 1/(1 − p).

    It is made from torch's dropout layers by `install_dropout`, never from scratch.
    """

    p: float
    masks: Masks
    original: type[nn.Module]

    @property
    def channels(self) -> bool:
        """Check whether whole channels (the second axis) are dropped."""
        return self.original is not nn.Dropout

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        source = self.masks.source
        if source is no_masks:
            return x * 1
        if torch.compiler.is_compiling():  # torch.compile cannot follow a stream
            return torch.feature_dropout(x, self.p, True) if self.channels else torch.dropout(x, self.p, True)
        if source is None:
            raise RuntimeError(
                "nn.Dropout has no masks outside of an engine, nor in a forward pass that is computed again for its "
                "gradient (torch.utils.checkpoint). Call torch.nn.functional.dropout there"
            )
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channels else x.shape
        rows, *others = shape or (1,)
        return x * source(rows, math.prod(others), self.p).view(shape).to(device=x.device, dtype=x.dtype)


REPLACED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def install_dropout(module: nn.Module, masks: Masks) -> None:
    """Make every nn.Dropout, Dropout1d, 2d and 3d of a model draw from these masks.

    Dropout without a layer (`F.dropout`) keeps torch's generator.
    """
    for part in module.modules():
        if type(part) in REPLACED:
            part.original, part.__class__ = type(part), Dropout  # type: ignore[assignment]
        if isinstance(part, Dropout):
            part.masks = masks


def remove_dropout(module: nn.Module) -> None:
    """Restore torch's own dropout layers."""
    for part in module.modules():
        if isinstance(part, Dropout):
            part.__class__ = part.original  # type: ignore[assignment]
            del part.masks, part.original


def has_dropout(module: nn.Module) -> bool:
    """Check whether the model draws masks in training mode."""
    return any(isinstance(layer, Dropout) and 0 < layer.p < 1 for layer in module.modules())


LEAST_SHARE = 1 / 8
"""Ratio of the texts' values to the filters' values below which this is slower, since the filters are reordered, too.

Measured with 16 to 400 filters on 1 to 20 texts of 30 words. torch computes a single text faster in another way."""


class WordConvolution(nn.Conv1d):
    """nn.Conv1d, (n, E, L) to (n, F, L'), for words in their memory order: all values of a word are adjacent.

    A table of word vectors returns this order, and nn.Conv1d gets `words.transpose(1, 2)`, which torch copies into the
    order (n, E, L), and the gradient back. oneDNN reads them without a copy as one-row "channels last" images. The sums
    are the same, and 400 filters over 3 words of 300 values take 0.73 of the time.
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor:  # a proxy while the model is traced
            return super().forward(input)
        word_by_word = input.dim() == 3 and input.stride(1) == 1 and input.device.type == "cpu"
        if not word_by_word or len(input) == 1 or input.numel() < LEAST_SHARE * self.weight.numel():
            return super().forward(input)
        weight = self.weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        return nn.functional.conv2d(
            input.unsqueeze(2),
            weight,
            self.bias,
            (1, *self.stride),
            self.padding if isinstance(self.padding, str) else (0, *self.padding),
            (1, *self.dilation),
        ).squeeze(2)
