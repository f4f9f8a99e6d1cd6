"""From layers one after another to their stacked forms, written by hand: the fastest there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedmpi.data.schema import DataDescription
from fedmpi.models.dropout import Dropout
from fedmpi.models.stacked.base import ALIGNMENT, Layer, NotStackable, Slot
from fedmpi.models.stacked.dense import Flatten, Linear, ReLU, Squash, StackedDropout
from fedmpi.models.stacked.image import Convolution, Geometry, ImageColumns, MaxPool, MeanPool
from fedmpi.models.stacked.long_runs import with_long_runs
from fedmpi.models.stacked.pooled import with_pools
from fedmpi.models.stacked.text import Embedding, StackedMaxOverTime
from fedmpi.models.text_layers import FrozenEmbedding, MaxOverTime

ROWS, COLUMNS, WORDS = "rows", "columns", "words"


LARGEST_UNFOLDED = 100_000
"""Values of one unfolded image above which torch's own convolution, client by client in a graph, is quicker: measured,
it is with 147,000 and 259,000, the same with 51,000, and takes up to twice as long with 15,000."""


@dataclass(frozen=True)
class StackedNet:
    """A model as a list of stacked layers."""

    layers: tuple[Layer, ...]
    slots: tuple[Slot, ...]  # Of all parameters that lie in the stack: all but the word vectors
    size: int  # Values of the flat vector; of a client's row in the stack, alignment included
    stack_size: int
    description: DataDescription  # Of the samples and their targets

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.description.feature_shape)

    @property
    def reads_words(self) -> bool:
        """Whether samples are token ids."""
        return self.description.task == "text"

    @property
    def embedding(self) -> Embedding | None:
        """The look-up of words, always the first layer."""
        return self.layers[0] if isinstance(self.layers[0], Embedding) else None

    @property
    def head(self) -> Linear | None:
        """The first layer, where it is a product with the samples themselves."""
        return self.layers[0] if isinstance(self.layers[0], Linear) else None

    @property
    def first_trained(self) -> int:
        """Index of the first layer with parameters: the gradient goes back as far as that."""
        return next(i for i, layer in enumerate(self.layers) if layer.trained)

    @property
    def values_per_row(self) -> int:
        """Floats that one sample needs in buffers."""
        return math.prod(self.feature_shape) + sum(layer.values for layer in self.layers)


def sequence(module: nn.Module, description: DataDescription, parts: Iterable[nn.Module]) -> StackedNet:
    """The stacked form of layers one after another."""
    translation = _Translation(module, description)
    for part in parts:
        translation.add(part)
    return translation.finish()


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a module, nn.Sequential opened."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise NotStackable(f"{type(module).__name__} has hooks")
    if "forward" in vars(module):
        raise NotStackable(f"a {type(module).__name__} was given another forward")
    if type(module) is nn.Sequential:
        for child in module:
            yield from parts_of(child)
    else:
        yield module


@dataclass
class _Translation:
    module: nn.Module
    description: DataDescription
    layers: list[Layer] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape = tuple(self.description.feature_shape)
        self.form = WORDS if self.description.task == "text" else ROWS
        self.start = 0
        self.offsets: dict[int, int] = {}
        self.size = 0
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                raise NotStackable("some parameters are frozen")
            if parameter._backward_hooks:
                raise NotStackable("a parameter has hooks")
            self.offsets[id(parameter)] = self.size
            self.size += parameter.numel()

    @property
    def units(self) -> int:
        return math.prod(self.shape)

    def add(self, part: nn.Module) -> None:
        kind = type(part)
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise NotStackable(f"{kind.__name__} has no stacked form")
        handler(self, part)

    def finish(self) -> StackedNet:
        if self.offsets:
            raise NotStackable("some parameters belong to no layer")
        if not self.layers or not isinstance(self.layers[-1], Linear) or self.shape != self.description.output_shape:
            raise NotStackable("the last layer is not a Linear of one logit a class")
        return StackedNet(
            with_long_runs(with_pools(self.layers)), tuple(self.slots), self.size, self.start, self.description
        )

    def slot(self, parameter: Tensor | None, axes: tuple[int, ...] | None = None, stack: bool = True) -> Slot:
        """Reserve a place for a parameter; every parameter has one."""
        offset = self.offsets.pop(id(parameter), None)
        if parameter is None or offset is None:
            raise NotStackable("a parameter is shared by two layers")
        slot = Slot(offset, tuple(parameter.shape), self.start if stack else 0, axes)
        if stack:
            self.slots.append(slot)
            self.start += -(-slot.size // ALIGNMENT) * ALIGNMENT
        return slot

    def optional(self, parameter: Tensor | None) -> Slot | None:
        return None if parameter is None else self.slot(parameter)

    def need(self, form: str, dimensions: int, part: nn.Module) -> None:
        if self.form != form or len(self.shape) != dimensions:
            raise NotStackable(f"{type(part).__name__} on an input of shape {self.shape}")

    def need_columns(self, part: nn.Module) -> None:
        if self.form == ROWS and len(self.shape) == 3:
            self.layers.append(ImageColumns(self._image()))
            self.form = COLUMNS
        self.need(COLUMNS, 3, part)

    def linear(self, part: nn.Linear) -> None:
        self.need(ROWS, 1, part)
        if self.shape != (part.in_features,):
            raise NotStackable(f"Linear of {part.in_features} inputs on {self.units} values")
        weight, bias = self.slot(part.weight), self.optional(part.bias)
        self.layers.append(Linear(part.in_features, part.out_features, weight, bias))
        self.shape = (part.out_features,)

    def relu(self, part: nn.Module) -> None:
        if self.form == WORDS:
            raise NotStackable("ReLU on words")
        self.layers.append(ReLU())

    def squash(self, part: nn.Module) -> None:
        if self.form == WORDS or not self.layers:
            raise NotStackable(f"{type(part).__name__} on words, or on the samples themselves")
        if isinstance(part, nn.Sigmoid) and self._cut():
            raise NotStackable("Sigmoid in the place of ReLU's outputs, which tell ReLU where they were cut")
        self.layers.append(Squash("tanh" if isinstance(part, nn.Tanh) else "sigmoid", self.units))

    def _cut(self) -> bool:
        """Whether the next layer in place would write over outputs of ReLU."""
        for layer in reversed(self.layers):
            if isinstance(layer, ReLU):
                return True
            if not isinstance(layer, Squash | StackedDropout | Flatten):
                break
        return False

    def dropout(self, part: Dropout | nn.Dropout) -> None:
        if part.p == 0:
            return
        if self.form == WORDS or part.p == 1 or getattr(part, "channels", False):
            raise NotStackable("Dropout of words, of whole channels, or of everything")
        self.layers.append(StackedDropout(self.units, part.p, self.form == COLUMNS))

    def flatten(self, part: nn.Flatten) -> None:
        if part.start_dim != 1 or part.end_dim not in (-1, len(self.shape)) or self.form == WORDS:
            raise NotStackable("Flatten of only some of the axes")
        if self.form == COLUMNS:
            self.layers.append(Flatten(self.units))
        self.shape, self.form = (self.units,), ROWS

    def convolution(self, part: nn.Conv2d) -> None:
        self.need_columns(part)
        if part.groups != 1 or set(part.dilation) != {1} or part.padding_mode != "zeros":
            raise NotStackable("Conv2d with groups, dilation, or padding other than zeros")
        geometry = Geometry(self._image(), _pair(part.kernel_size), _pair(part.stride), self._padding(part))
        if part.in_channels != self.shape[0] or min(geometry.output) < 1:
            raise NotStackable(f"Conv2d of {part.in_channels} channels on an input of shape {self.shape}")
        if geometry.patch * math.prod(geometry.output) > LARGEST_UNFOLDED:
            raise NotStackable(f"Conv2d on an input of shape {self.shape}, too large to be unfolded")
        weight, bias = self.slot(part.weight), self.optional(part.bias)
        self.layers.append(Convolution(geometry, part.out_channels, weight, bias))
        self.shape = (part.out_channels, *geometry.output)

    def pool(self, part: nn.MaxPool2d) -> None:
        self.need_columns(part)
        if part.ceil_mode or part.return_indices or _pair(part.dilation) != (1, 1):
            raise NotStackable("MaxPool2d with ceil_mode, indices or dilation")
        geometry = Geometry(self._image(), _pair(part.kernel_size), _pair(part.stride), _pair(part.padding))
        window = geometry.kernel, geometry.stride, geometry.padding
        self.layers.append(MaxPool(geometry.image, geometry.output, *window))
        self.shape = (self.shape[0], *geometry.output)

    def mean_pool(self, part: nn.AvgPool2d) -> None:
        self.need_columns(part)
        if part.ceil_mode or part.divisor_override is not None:
            raise NotStackable("AvgPool2d with ceil_mode or a divisor of its own")
        geometry = Geometry(self._image(), _pair(part.kernel_size), _pair(part.stride), _pair(part.padding))
        self._means(geometry, part.count_include_pad)

    def adaptive_mean_pool(self, part: nn.AdaptiveAvgPool2d) -> None:
        self.need_columns(part)
        _, *sizes = self.shape
        given = part.output_size if isinstance(part.output_size, tuple | list) else (part.output_size, part.output_size)
        wanted = [size if one is None else one for one, size in zip(given, sizes, strict=True)]
        if any(size % one for one, size in zip(wanted, sizes, strict=True)):
            raise NotStackable("AdaptiveAvgPool2d to sizes that do not divide the image's")
        kernel = sizes[0] // wanted[0], sizes[1] // wanted[1]
        self._means(Geometry(self._image(), kernel, kernel, (0, 0)), True)

    def _means(self, geometry: Geometry, padding_counts: bool) -> None:
        window = geometry.kernel, geometry.stride, geometry.padding
        self.layers.append(MeanPool(geometry.image, geometry.output, *window, padding_counts))
        self.shape = (self.shape[0], *geometry.output)

    def embedding(self, part: nn.Embedding) -> None:
        if self.layers or self.form != WORDS or part.max_norm is not None or part.scale_grad_by_freq:
            raise NotStackable("Embedding with max_norm or scale_grad_by_freq, or not of the sample's tokens")
        if part.padding_idx is not None:
            raise NotStackable("Embedding with padding_idx")
        slot = self.slot(part.weight, stack=False)
        self._words(Embedding(self.units, part.embedding_dim, slot))

    def frozen_embedding(self, part: FrozenEmbedding) -> None:
        if self.layers or self.form != WORDS:
            raise NotStackable("an embedding that does not look up the sample's tokens")
        self._words(Embedding(self.units, part.vectors.shape[1], None, part.vectors))

    def _words(self, layer: Embedding) -> None:
        self.layers.append(layer)
        self.shape = (layer.length, layer.dimension)

    def max_over_time(self, part: MaxOverTime) -> None:
        self.need(WORDS, 2, part)
        length, dimension = self.shape
        banks = [bank for bank in part.convolutions if isinstance(bank, nn.Conv1d)]
        widths = tuple(bank.kernel_size[0] for bank in banks)
        filters = banks[0].out_channels
        weights = tuple(self.slot(bank.weight, axes=(0, 2, 1)) for bank in banks)
        biases = tuple(self.slot(bank.bias) for bank in banks)
        self.layers.append(StackedMaxOverTime(length, dimension, filters, widths, weights, biases))
        self.shape, self.form = (filters * len(widths),), ROWS

    def _image(self) -> tuple[int, int, int]:
        return self.shape[0], self.shape[1], self.shape[2]

    def _padding(self, part: nn.Conv2d) -> tuple[int, int]:
        if part.padding == "valid":
            return 0, 0
        if part.padding == "same":
            if any(size % 2 == 0 for size in part.kernel_size):
                raise NotStackable("Conv2d with padding 'same' and an even kernel")
            return part.kernel_size[0] // 2, part.kernel_size[1] // 2
        return _pair(part.padding)


def _pair(value: object) -> tuple[int, int]:
    if isinstance(value, tuple | list):
        return int(value[0]), int(value[-1])
    assert isinstance(value, int)
    return value, value


_HANDLERS: dict[type[nn.Module], Callable[[_Translation, Any], None]] = {
    nn.Linear: _Translation.linear,
    nn.ReLU: _Translation.relu,
    nn.Dropout: _Translation.dropout,
    Dropout: _Translation.dropout,
    nn.Flatten: _Translation.flatten,
    nn.Conv2d: _Translation.convolution,
    nn.MaxPool2d: _Translation.pool,
    nn.AvgPool2d: _Translation.mean_pool,
    nn.AdaptiveAvgPool2d: _Translation.adaptive_mean_pool,
    nn.Tanh: _Translation.squash,
    nn.Sigmoid: _Translation.squash,
    nn.Embedding: _Translation.embedding,
    FrozenEmbedding: _Translation.frozen_embedding,
    MaxOverTime: _Translation.max_over_time,
    nn.Identity: lambda translation, part: None,
}
