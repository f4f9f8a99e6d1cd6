"""A traced graph that is a chain of layers, as a list of modules: functional calls become modules that do the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedmpi.models.stacked.trace import Along, Traced

SAMPLES_FIRST = Along(0, 1)


def chain(traced: Traced) -> list[nn.Module] | None:
    """The layers of a graph from the samples to the outputs, or None where it is no chain of layers."""
    parts: list[nn.Module] = []
    current: fx.Node | None = None
    for node in traced.nodes:
        if node.op == "output":
            return parts if node.args[0] is current else None
        if node.op == "placeholder":
            current = node
        elif traced.tensor(node) is not None:
            read = [given for given in node.all_input_nodes if traced.tensor(given) is not None]
            part = _part(traced, node) if read == [current] and traced.along(node) == SAMPLES_FIRST else None
            if part is None:
                return None
            parts.append(part)
            current = node
        elif not isinstance(traced.examples[node][0], int):
            return None
    return None


def _part(traced: Traced, node: fx.Node) -> nn.Module | None:
    """The layer that does what a node does, or None."""
    if node.op == "call_module":
        return traced.part(node)
    make = _PARTS.get(node.target) if node.op in ("call_function", "call_method") else None
    return None if make is None else make(traced, node)


def _relu(traced: Traced, node: fx.Node) -> nn.Module | None:
    return nn.ReLU()


def _reshaped(traced: Traced, node: fx.Node) -> nn.Module | None:
    """A change of shape: nn.Flatten where it joins all axes but the first, nn.Identity where the shape stays."""
    given = next(one for one in node.all_input_nodes if traced.tensor(one) is not None)
    before, after = traced.tensor(given), traced.tensor(node)
    assert before is not None and after is not None
    if traced.along(given) != SAMPLES_FIRST:
        return None
    if before.shape == after.shape:
        return nn.Identity()
    return nn.Flatten() if after.shape[1:] == (math.prod(before.shape[1:]),) else None


def _tanh(traced: Traced, node: fx.Node) -> nn.Module | None:
    return nn.Tanh()


def _sigmoid(traced: Traced, node: fx.Node) -> nn.Module | None:
    return nn.Sigmoid()


def _with_options(kind: type[nn.Module], *names: str) -> Callable[[Traced, fx.Node], nn.Module | None]:
    """What makes a layer of class `kind` from a call of the function with these parameters after the input."""

    def make(traced: Traced, node: fx.Node) -> nn.Module | None:
        given: dict[str, Any] = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        given.pop("input", None)
        if any(isinstance(value, fx.Node) for value in given.values()):
            return None
        if not given.get("stride", True):
            given.pop("stride")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        return kind(**plain)

    return make


def _dropout(traced: Traced, node: fx.Node) -> nn.Module | None:
    """nn.Dropout with the p of the call, or nn.Identity where the call returned its input (p = 0, or not training)."""
    masks, (given,) = traced.masks_of(node), node.all_input_nodes
    if masks:
        return nn.Dropout(masks[0][1])
    return nn.Identity() if traced.tensor(node) is traced.tensor(given) else None


_WINDOW = "kernel_size", "stride", "padding"
_max_pool = _with_options(nn.MaxPool2d, *_WINDOW, "dilation", "ceil_mode", "return_indices")
_mean_pool = _with_options(nn.AvgPool2d, *_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")


_PARTS: dict[Any, Callable[[Traced, fx.Node], nn.Module | None]] = {
    functional.relu: _relu,
    functional.relu_: _relu,
    torch.relu: _relu,
    torch.relu_: _relu,
    "relu": _relu,
    "relu_": _relu,
    functional.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
    functional.avg_pool2d: _mean_pool,
    functional.adaptive_avg_pool2d: _with_options(nn.AdaptiveAvgPool2d, "output_size"),
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    functional.tanh: _tanh,
    torch.tanh: _tanh,
    "tanh": _tanh,
    functional.sigmoid: _sigmoid,
    torch.sigmoid: _sigmoid,
    "sigmoid": _sigmoid,
    torch.flatten: _reshaped,
    torch.reshape: _reshaped,
    Tensor.view: _reshaped,
    "flatten": _reshaped,
    "reshape": _reshaped,
    "view": _reshaped,
    "contiguous": _reshaped,
    "squeeze": _reshaped,
}
