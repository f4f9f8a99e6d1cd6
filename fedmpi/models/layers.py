"""Layers that replace torch's: dropout with masks per client, and faster convolutions over words.

Masks are drawn from the stream (DROPOUT, round, client) and never from torch, layer by layer and step by step, so that
every engine gives a client the same masks. They are made from raw 64-bit words (torch's bernoulli_ takes 12 % of a step
of a small CNN on a CPU).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.types import Bytes

_HALVES = 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)
"""Mask values for the eight bits of every byte at p = 1/2, float32 (256, 8)."""


def draw_mask(
    generator: np.random.Generator, rows: int, units: int, p: float, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return a dropout mask from whole 64-bit words of the generator.

    It uses one bit per unit for p = 1/2, a byte if p is a multiple of 1/256, else 16 bits (p is then met to 2**-17).
    """
    count = rows * units
    if out is None:
        out = np.empty((rows, units), np.float32)
    if p == 0.5:
        drawn, whole, flat = _raw_bytes(generator, -(-count // 8)), count // 8, out.reshape(-1)
        np.take(_HALVES, drawn[:whole], axis=0, out=flat[: 8 * whole].reshape(whole, 8), mode="clip")
        if count % 8:
            flat[8 * whole :] = _HALVES[drawn[whole], : count % 8]
        return out
    if (p * 256).is_integer():
        kept = _raw_bytes(generator, count)[:count] >= np.uint8(p * 256)
    else:
        kept = _raw_bytes(generator, 2 * count).view("<u2")[:count] >= np.uint16(min(round(p * 65536), 65535))
    np.multiply(kept.reshape(rows, units), np.float32(1 / (1 - p)), out=out)
    return out


def _raw_bytes(generator: np.random.Generator, count: int) -> Bytes:
    """Return at least `count` bytes: whole words, little-endian."""
    words: NDArray[np.uint64] = generator.bit_generator.random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)


class NoMasks:
    """Source of the masks of dropout layers; this one disables dropout while the model stays in training mode.

    An engine sets a source before it runs the model.
    """

    drops = False

    def mask(self, rows: int, units: int, p: float) -> Tensor:
        """Return the next mask, float32 (rows, units) on the CPU: 0 or 1/(1 − p)."""
        return torch.ones(rows, units)


class ClientMasks(NoMasks):
    """Masks of one client."""

    drops = True

    def __init__(self, stream: Callable[[], np.random.Generator]):
        self._stream = stream

    @cached_property
    def generator(self) -> np.random.Generator:
        return self._stream()

    def mask(self, rows: int, units: int, p: float) -> Tensor:
        return torch.from_numpy(draw_mask(self.generator, rows, units, p))


class JoinedMasks(NoMasks):
    """Masks of several clients whose samples are concatenated in one batch, each from its own stream."""

    drops = True

    def __init__(self, generators: Sequence[np.random.Generator], counts: Sequence[int]):
        self.generators = generators
        self.counts = counts
        self.rows = sum(counts)

    def mask(self, rows: int, units: int, p: float) -> Tensor:
        if rows != self.rows:
            raise RuntimeError(
                f"dropout saw {rows} rows where the batch has {self.rows}: its first axis must be the samples"
            )
        parts = [
            draw_mask(generator, count, units, p) for generator, count in zip(self.generators, self.counts, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts))


class ComputedAgain(NoMasks):
    """Source that rejects masks while gradients are computed: new masks would differ from those of the forward pass."""

    def mask(self, rows: int, units: int, p: float) -> Tensor:
        raise UserError(
            "the model computes an nn.Dropout layer once more in the backward pass (torch.utils.checkpoint), where it "
            "would drop other values. Call torch.nn.functional.dropout there"
        )


class Masks:
    """Reference to the mask source, shared by all dropout layers of one model."""

    def __init__(self) -> None:
        self.source: NoMasks | None = None

    @contextmanager
    def given_by(self, source: NoMasks) -> Iterator[None]:
        """Use this source for the model within the context."""
        before, self.source = self.source, source
        try:
            yield
        finally:
            self.source = before


def dropped(x: Tensor, p: float, masks: Masks, channels: bool = False) -> Tensor:
    """Multiply x (rows, …) by the next mask of the source, per channel (second axis) or per value; 0 < p < 1."""
    if torch.compiler.is_compiling() and getattr(masks.source, "drops", True):  # torch.compile cannot follow a stream
        return torch.feature_dropout(x, p, True) if channels else torch.dropout(x, p, True)
    if masks.source is None:
        raise RuntimeError("dropout in training mode outside an engine: it has no source of masks")
    shape = x.shape[:2] + (1,) * (x.dim() - 2) if channels else x.shape
    rows, *others = shape or (1,)
    mask = masks.source.mask(rows, math.prod(others), p)
    return x * mask.view(shape).to(device=x.device, dtype=x.dtype, non_blocking=True)


class Dropout(nn.Module):
    """Layer that zeroes values with probability p in training mode and scales the others by 1/(1 − p)."""

    def __init__(self, p: float, masks: Masks, channels: bool = False, original: type[nn.Module] = nn.Dropout):
        super().__init__()
        self.original = original
        self.p = p
        self.masks = masks
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        return dropped(x, self.p, self.masks, self.channels)

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.channels}"


_REPLACED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def install_dropout(module: nn.Module, masks: Masks | None = None) -> Masks:
    """Replace every nn.Dropout, Dropout1d, 2d and 3d inside a model by `Dropout`; a second call changes nothing.

    Dropout without a layer (`F.dropout`) keeps torch's generator.
    """
    if masks is None:
        masks = next((layer.masks for layer in module.modules() if isinstance(layer, Dropout)), Masks())
    swapped: dict[nn.Module, Dropout] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # also under its second name
            if isinstance(child, Dropout):
                child.masks = masks
            elif isinstance(child, _REPLACED) and type(child) in _REPLACED:
                channels = not isinstance(child, nn.Dropout)
                new = swapped.setdefault(child, Dropout(child.p, masks, channels, type(child)))
                setattr(parent, name, new.train(child.training))
    return masks


def remove_dropout(module: nn.Module) -> None:
    """Restore torch's own dropout layers instead of those of `install_dropout`."""
    swapped: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # also under its second name
            if isinstance(child, Dropout):
                setattr(parent, name, swapped.setdefault(child, child.original(child.p)).train(child.training))


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


def install_word_convolutions(module: nn.Module) -> None:
    """Make every plain nn.Conv1d inside a model compute as `WordConvolution`; a second call changes nothing."""
    for part in module.modules():
        if type(part) is nn.Conv1d and part.groups == 1 and part.padding_mode == "zeros":
            part.__class__ = WordConvolution


def remove_word_convolutions(module: nn.Module) -> None:
    """Undo `install_word_convolutions`."""
    for part in module.modules():
        if type(part) is WordConvolution:
            part.__class__ = nn.Conv1d  # type: ignore[assignment]
