"""A model's forward pass as a torch.fx graph, with the value of every node on two batches of different size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from fedmpi.common.errors import raised
from fedmpi.data.schema import DataDescription
from fedmpi.models.dropout import Dropout
from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.forms import LAYERS

ROWS = 3, 5
"""Samples of two dummy batches, which show the sample axis of every value."""
DROPOUTS = (Dropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
NUMBER = "number"
"""Mark of a number or shape that grows with the number of samples."""


@dataclass(frozen=True)
class Along:
    """Axis of a tensor that indexes the samples."""

    axis: int  # -1 if several axes depend on the number of samples
    times: int  # entries per sample: more than 1 if the axis was joined with another one


@dataclass(frozen=True)
class Traced:
    """Forward pass of a module."""

    module: nn.Module  # the module to be trained; the trace is of a copy
    graph: fx.Graph  # one placeholder: the samples
    values: tuple[dict[fx.Node, Any], dict[fx.Node, Any]]  # values of every node on the two dummy batches

    def part(self, node: fx.Node) -> nn.Module:
        """Return the layer that a node of the kind "call_module" calls."""
        return self.module.get_submodule(str(node.target))

    def value(self, node: fx.Node) -> Any:
        """Return a node's value on the first batch."""
        return self.values[0][node]

    def along(self, node: fx.Node) -> Any:
        """Return the sample axis of a node's value: an `Along`, None, NUMBER, or a tuple of these."""
        return _along(self.values[0][node], self.values[1][node])


def _along(one: Any, other: Any) -> Any:
    if isinstance(one, tuple | list) and not isinstance(one, torch.Size):
        return tuple(_along(a, b) for a, b in zip(one, other, strict=True))
    if not isinstance(one, Tensor):
        return None if one == other else NUMBER
    axes = (
        [axis for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]] if one.dim() == other.dim() else []
    )
    if one.shape == other.shape:
        return None
    times = one.shape[axes[0]] // ROWS[0] if axes else 0
    even = len(axes) == 1 and tuple(times * rows for rows in ROWS) == (one.shape[axes[0]], other.shape[axes[0]])
    return Along(axes[0], times) if even else Along(-1, 0)


class _Proxy(fx.Proxy):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "grad", "requires_grad"):
            raise NotStackable("the forward pass changes parameters or buffers")
        super().__setattr__(name, value)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if not torch.is_grad_enabled():
            raise NotStackable("the forward pass computes without gradients (torch.no_grad)")
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYERS or isinstance(m, DROPOUTS) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        return root_fn, [self.root, self.create_proxy("placeholder", "samples", (), {})]

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace through a layer that the forward pass itself creates (`nn.Softmax(dim=1)(x)`)."""
        known = any(m is part for part in self.root.modules())
        return super().call_module(m, forward, args, kwargs) if known else forward(*args, **kwargs)


class _Values(fx.Interpreter):
    """Interpreter of a graph that keeps the value of every node."""

    def __init__(self, module: nn.Module, graph: fx.Graph):
        super().__init__(module, graph=graph)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = value = super().run_node(n)
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        dropout = isinstance(self.fetch_attr(target), DROPOUTS)
        return args[0] if dropout else super().call_module(target, args, kwargs)


def trace(module: nn.Module, copied: nn.Module, description: DataDescription) -> Traced:
    """Return the graph of a module's forward pass in training mode, traced on a copy of it."""
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise NotStackable(f"{type(part).__name__} has hooks")
    if any(parameter._backward_hooks for parameter in module.parameters()):
        raise NotStackable("a parameter has hooks")
    try:
        with _own_gradients_refused(), torch.enable_grad():
            tracer = _Tracer()
            graph = tracer.trace(copied)
        tracer.root, tracer.tensor_attrs = nn.Module(), {}  # torch's remaining reference cycle then contains no values
        _check_layers(copied, graph)
        found = []
        for rows in ROWS:
            values = _Values(copied, graph)
            with torch.no_grad():
                values.run(made_up(module, description, rows))
            found.append(values.found)
    except NotStackable:
        raise
    except Exception as error:
        raise NotStackable(f"torch.fx cannot trace {type(module).__name__}: {raised(error)}") from error
    return Traced(module, graph, (found[0], found[1]))


@contextmanager
def _own_gradients_refused() -> Iterator[None]:
    """Make a custom torch.autograd.Function raise within the context, since a trace would lose its backward pass."""
    base: Any = torch.autograd.Function
    original = base.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, fx.Proxy) for one in args):
            raise NotStackable(f"{cls.__name__} has a backward pass of its own")
        return original.__func__(cls, *args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        base.apply = original


def _check_layers(module: nn.Module, graph: fx.Graph) -> None:
    """Reject layers that keep values between batches or drop values inside, and numbers that depend on values."""
    for node in graph.nodes:
        if node.target in ("item", "tolist"):
            raise NotStackable("the forward pass makes a number of a tensor's values")
        part = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if part is None or type(part) in LAYERS or isinstance(part, DROPOUTS):
            continue
        if any(True for _ in part.buffers()) or any(isinstance(one, DROPOUTS) and one.p > 0 for one in part.modules()):
            raise NotStackable(f"{type(part).__name__} has no batched form")


def made_up(module: nn.Module, description: DataDescription, rows: int) -> Tensor:
    """Return dummy samples as the module reads them: (rows, …).

    Texts resemble real ones: from the second one on they end with padding (0), and half of the other tokens are among
    the first few ids, which often have a special meaning.
    """
    parameter = next(module.parameters())
    generator = np.random.Generator(np.random.Philox(rows))
    shape = (rows, *description.feature_shape)
    if description.task != "text":
        return torch.from_numpy(generator.standard_normal(shape)).to(device=parameter.device, dtype=parameter.dtype)
    words = max(description.vocabulary, 1)
    tokens = generator.integers(0, words, shape, dtype=np.int32)
    few = np.array([0, 1, 2, 3, words - 1], np.int32) % words
    tokens = np.where(generator.random(shape) < 0.5, few[generator.integers(0, len(few), shape)], tokens)
    tokens[..., 0] = generator.integers(min(1, words - 1), words, shape[:-1])
    for row in range(1, len(tokens)):
        tokens[row, ..., max(1, tokens.shape[-1] // (row + 1)) :] = 0
    return torch.from_numpy(tokens).to(parameter.device)
