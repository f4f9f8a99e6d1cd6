"""Forward passes as torch.fx graphs, and hand-written batched forms, the fastest ones, for those that are a chain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedmpi.common.errors import raised
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.convolution import CONVOLUTION, Geometry, ImageColumns, ImagePool, MaxPool, MeanPool
from fedmpi.local.batched.first_layer import FirstLinear
from fedmpi.local.batched.forms import LAYERS
from fedmpi.local.batched.layers import Flatten, Layer, Linear, NotStackable, ReLU, Slot, Squash, StackedDropout
from fedmpi.local.batched.pooled import with_pools
from fedmpi.local.batched.text import Embedding
from fedmpi.local.traits import trial_samples
from fedmpi.models.isolation import Tracer
from fedmpi.models.layers import Dropout

ROWS = 3
"""Dummy samples of a batch."""
DROPOUTS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
LARGEST_UNFOLDED = 100_000
"""Values of one unfolded image above which torch's own convolution, client by client, is faster on a CPU."""


@dataclass(frozen=True)
class StackedNet:
    """Model as a list of batched layers."""

    layers: tuple[Layer, ...]
    slots: tuple[Slot, ...]  # slots of all parameters in the stack: all except the word vectors
    size: int  # values of the flat vector; of a client's row in the stack, with alignment
    stack_size: int
    description: DataDescription  # description of the samples and their targets

    @property
    def embedding(self) -> Embedding | None:
        """Return the look-up of words, always the first layer."""
        return self.layers[0] if isinstance(self.layers[0], Embedding) else None

    @property
    def head(self) -> FirstLinear | None:
        """Return the first layer if it is a product with the samples themselves."""
        return self.layers[0] if isinstance(self.layers[0], FirstLinear) else None

    @property
    def first_trained(self) -> int:
        """Return the index of the first layer with parameters, at which the backward pass ends."""
        return next(i for i, layer in enumerate(self.layers) if layer.trained)

    @property
    def values_per_row(self) -> int:
        """Return the number of floats per sample in buffers."""
        return math.prod(self.description.feature_shape) + sum(layer.values for layer in self.layers)


@dataclass(frozen=True)
class Traced:
    """Forward pass of a module, with the value of every node on a few trial samples, without dropout."""

    module: nn.Module  # the module to be trained
    copied: nn.Module  # copy of it that is traced, with dropout at 0
    graph: fx.Graph  # one placeholder: the samples
    values: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def last(self) -> fx.Node:
        """Return the node of the outputs."""
        (returned,) = next(reversed(self.graph.nodes)).args
        if not isinstance(returned, fx.Node) or not isinstance(self.value(returned), Tensor):
            raise NotStackable("the forward pass does not return one tensor")
        return returned

    def part(self, node: fx.Node) -> nn.Module:
        """Return the layer that a node of the kind "call_module" calls."""
        return self.copied.get_submodule(str(node.target))

    def value(self, node: Any) -> Any:
        """Return a node's value, or a constant itself."""
        return self.values[node] if isinstance(node, fx.Node) else node


class _Values(fx.Interpreter):
    """Interpreter of a graph that keeps the value of every node."""

    def __init__(self, traced: Traced):
        super().__init__(traced.copied, graph=traced.graph)
        self.found = traced.values

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = value = super().run_node(n)
        return value


def trace(module: nn.Module, copied: nn.Module, description: DataDescription) -> Traced:
    """Return the graph of a module's forward pass in training mode, traced on a copy of it without dropout."""
    if type(module) in LAYERS:
        module, copied = nn.Sequential(module), nn.Sequential(copied)
    for part in copied.modules():
        if isinstance(part, DROPOUTS):
            part.p = 0.0
    try:
        tracer = Tracer(LAYERS)
        traced = Traced(module, copied, tracer.trace(copied))
        tracer.root, tracer.tensor_attrs = nn.Module(), {}  # torch's remaining reference cycle then contains no values
        with torch.no_grad():
            _Values(traced).run(trial_samples(description, ROWS, next(copied.parameters())))
    except Exception as error:
        raise NotStackable(f"torch.fx cannot trace {type(module).__name__}: {raised(error)}") from error
    return traced


def by_hand(traced: Traced, description: DataDescription) -> StackedNet:
    """Return the batched form of a graph that is a chain of known layers, as modules or as functions."""
    translation = _Translation(traced, description)
    nodes = list(traced.graph.nodes)
    current = nodes[0]
    for node in nodes[1:-1]:
        value = traced.value(node)
        if not isinstance(value, Tensor):
            continue  # a shape; its reader is examined
        read = [given for given in node.all_input_nodes if isinstance(traced.value(given), Tensor)]
        if read != [current] or value.shape[:1] != (ROWS,):
            raise NotStackable("layers do not follow one another")
        translation.add(node, current)
        current = node
    if traced.last is not current:
        raise NotStackable("the outputs are not those of the last layer")
    return translation.finish()


class _Translation:
    def __init__(self, traced: Traced, description: DataDescription):
        self.traced, self.description = traced, description
        self.layers: list[Layer] = []
        self.slots: list[Slot] = []
        self.shape = tuple(description.feature_shape)
        self.columns = False  # True if activations are columns, False if they are rows
        self.images = next(traced.copied.parameters()).device.type != "cpu"  # convolutions read images, not columns
        self.start = self.size = 0
        self.offsets: dict[int, int] = {}
        if description.task == "text":
            raise NotStackable("texts")
        for parameter in traced.copied.parameters():
            if not parameter.requires_grad:
                raise NotStackable("some parameters are frozen")
            self.offsets[id(parameter)] = self.size
            self.size += parameter.numel()

    @property
    def units(self) -> int:
        return math.prod(self.shape)

    def add(self, node: fx.Node, before: fx.Node) -> None:
        """Add the layer that a node calls; a function becomes the equivalent layer."""
        part = self.traced.part(node) if node.op == "call_module" else None
        if isinstance(part, DROPOUTS):
            part = self.traced.module.get_submodule(str(node.target))
        if part is None and node.op != "get_attr":
            make = _FUNCTIONS.get(node.target)
            part = None if make is None else make(self.traced, node, before)
        handler = _HANDLERS.get(type(part))
        if handler is None:
            raise NotStackable(f"{type(part).__name__} is no layer that is known here")
        handler(self, part)

    def finish(self) -> StackedNet:
        if self.offsets:
            raise NotStackable("some parameters belong to no layer")
        if not self.layers or not isinstance(self.layers[-1], Linear) or self.shape != self.description.output_shape:
            raise NotStackable("the last layer is not a Linear of one logit per class")
        return StackedNet(with_pools(self.layers), tuple(self.slots), self.size, self.start, self.description)

    def slot(self, parameter: Tensor) -> Slot:
        """Reserve a slot for a parameter; every parameter has one."""
        offset = self.offsets.pop(id(parameter), None)
        if offset is None:
            raise NotStackable("a parameter is shared by two layers")
        slot = Slot(offset, tuple(parameter.shape), self.start)
        self.slots.append(slot)
        self.start += slot.aligned_size
        return slot

    def linear(self, part: nn.Linear) -> None:
        if self.columns or self.shape != (part.in_features,):
            raise NotStackable(f"Linear of {part.in_features} inputs on values of shape {self.shape}")
        weight, bias = self.slot(part.weight), None if part.bias is None else self.slot(part.bias)
        kind = Linear if self.layers else FirstLinear
        self.layers.append(kind(part.in_features, part.out_features, weight, bias))
        self.shape = (part.out_features,)

    def relu(self, part: nn.Module) -> None:
        if not self.layers:
            raise NotStackable("ReLU on the samples themselves")
        self.layers.append(ReLU())

    def squash(self, part: nn.Module) -> None:
        if not self.layers:
            raise NotStackable(f"{type(part).__name__} on the samples themselves")
        self.layers.append(Squash("tanh" if isinstance(part, nn.Tanh) else "sigmoid", self.units))

    def dropout(self, part: Dropout | nn.Dropout) -> None:
        if part.p == 0:
            return
        if part.p == 1 or getattr(part, "channels", False):
            raise NotStackable("Dropout of whole channels, or of everything")
        self.layers.append(StackedDropout(self.units, part.p, self.columns))

    def flatten(self, part: nn.Flatten) -> None:
        if part.start_dim != 1 or part.end_dim not in (-1, len(self.shape)):
            raise NotStackable("Flatten of only some of the axes")
        if self.columns:
            self.layers.append(Flatten(self.units))
        self.shape, self.columns = (self.units,), False

    def convolution(self, part: nn.Conv2d) -> None:
        if part.groups != 1 or set(part.dilation) != {1} or part.padding_mode != "zeros":
            raise NotStackable("Conv2d with groups, dilation, or padding other than zeros")
        geometry = Geometry(self._image(), _pair(part.kernel_size), _pair(part.stride), self._padding(part))
        if part.in_channels != self.shape[0] or min(geometry.output) < 1:
            raise NotStackable(f"Conv2d of {part.in_channels} channels on an input of shape {self.shape}")
        if not self.images and geometry.patch * math.prod(geometry.output) > LARGEST_UNFOLDED:
            raise NotStackable(f"Conv2d on an input of shape {self.shape}, too large to be unfolded")
        weight, bias = self.slot(part.weight), None if part.bias is None else self.slot(part.bias)
        self.layers.append(CONVOLUTION[self.images](geometry, part.out_channels, weight, bias))
        self.shape = (part.out_channels, *geometry.output)

    def pool(self, part: nn.MaxPool2d) -> None:
        if part.ceil_mode or part.return_indices or _pair(part.dilation) != (1, 1):
            raise NotStackable("MaxPool2d with ceil_mode, indices or dilation")
        self._pool(MaxPool(self._window(part)))

    def mean_pool(self, part: nn.AvgPool2d) -> None:
        if part.ceil_mode or part.divisor_override is not None:
            raise NotStackable("AvgPool2d with ceil_mode or a divisor of its own")
        self._pool(MeanPool(self._window(part), part.count_include_pad))

    def adaptive_mean_pool(self, part: nn.AdaptiveAvgPool2d) -> None:
        _, *sizes = self.shape
        given = part.output_size if isinstance(part.output_size, tuple | list) else (part.output_size, part.output_size)
        wanted = [size if one is None else one for one, size in zip(given, sizes, strict=True)]
        if any(size % one for one, size in zip(wanted, sizes, strict=True)):
            raise NotStackable("AdaptiveAvgPool2d to sizes that do not divide the image's")
        kernel = sizes[0] // wanted[0], sizes[1] // wanted[1]
        self._pool(MeanPool(Geometry(self._image(), kernel, kernel, (0, 0))))

    def _window(self, part: Any) -> Geometry:
        return Geometry(self._image(), _pair(part.kernel_size), _pair(part.stride), _pair(part.padding))

    def _pool(self, layer: MaxPool | MeanPool) -> None:
        self.layers.append(ImagePool(layer) if self.images else layer)
        self.shape = (self.shape[0], *layer.geometry.output)

    def _image(self) -> tuple[int, int, int]:
        """Return channels, height and width; on a CPU the images are columns from here on."""
        if len(self.shape) != 3 or (self.layers and not self.columns and not self.images):
            raise NotStackable(f"a layer of images on values of shape {self.shape}")
        if not self.columns and not self.images:
            self.layers.append(ImageColumns((self.shape[0], self.shape[1], self.shape[2])))
        self.columns = not self.images
        return self.shape[0], self.shape[1], self.shape[2]

    def _padding(self, part: nn.Conv2d) -> tuple[int, int]:
        if part.padding == "valid":
            return 0, 0
        if part.padding == "same":
            if any(size % 2 == 0 for size in part.kernel_size):
                raise NotStackable("Conv2d with padding 'same' and an even kernel")
            return part.kernel_size[0] // 2, part.kernel_size[1] // 2
        return _pair(part.padding)


def _pair(value: Any) -> tuple[int, int]:
    values = value if isinstance(value, tuple | list) else [value]
    return int(values[0]), int(values[-1])


_HANDLERS: dict[type, Callable[[_Translation, Any], None]] = {
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
    nn.Identity: lambda translation, part: None,
}

_Make = Callable[[Traced, fx.Node, fx.Node], nn.Module | None]


def _reshaped(traced: Traced, node: fx.Node, before: fx.Node) -> nn.Module | None:
    """Return a change of shape: nn.Flatten if it joins all axes except the first, nn.Identity if the shape stays."""
    was, now = tuple(traced.value(before).shape), tuple(traced.value(node).shape)
    if was == now:
        return nn.Identity()
    return nn.Flatten() if now[1:] == (math.prod(was[1:]),) else None


def _with_options(kind: type[nn.Module], *names: str) -> _Make:
    """Return a maker of layers of class `kind` from a function call with these parameters after the input."""

    def make(traced: Traced, node: fx.Node, before: fx.Node) -> nn.Module | None:
        given: dict[str, Any] = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        given.pop("input", None)
        if any(isinstance(value, fx.Node) for value in given.values()):
            return None
        if not given.get("stride", True):
            given.pop("stride")
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})

    return make


_WINDOW = "kernel_size", "stride", "padding"
_FUNCTIONS: dict[Any, _Make] = {
    **dict.fromkeys((functional.relu, functional.relu_, torch.relu, torch.relu_), _with_options(nn.ReLU, "inplace")),
    **dict.fromkeys(("relu", "relu_"), _with_options(nn.ReLU)),
    **dict.fromkeys((functional.tanh, torch.tanh, "tanh"), _with_options(nn.Tanh)),
    **dict.fromkeys((functional.sigmoid, torch.sigmoid, "sigmoid"), _with_options(nn.Sigmoid)),
    **dict.fromkeys((torch.flatten, torch.reshape, "flatten", "reshape", "view", "contiguous", "squeeze"), _reshaped),
    **dict.fromkeys(
        (functional.max_pool2d, torch.max_pool2d),
        _with_options(nn.MaxPool2d, *_WINDOW, "dilation", "ceil_mode", "return_indices"),
    ),
    functional.avg_pool2d: _with_options(nn.AvgPool2d, *_WINDOW, "ceil_mode", "count_include_pad", "divisor_override"),
    functional.adaptive_avg_pool2d: _with_options(nn.AdaptiveAvgPool2d, "output_size"),
}
