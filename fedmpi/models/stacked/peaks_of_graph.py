"""Finds the convolutions of a traced model of which only the maximum over the text is read: `peaks` computes these."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn import functional

from fedmpi.models.stacked.trace import Along, Traced
from fedmpi.models.word_convolution import WordConvolution


def find_peaks(traced: Traced) -> dict[fx.Node, tuple[list[fx.Node], bool]]:
    """Each such convolution of a graph, with the nodes from there to the maximum and whether ReLU is among them."""
    found = {}
    for node in traced.nodes:
        part = traced.part(node) if node.op == "call_module" else None
        if isinstance(part, nn.Conv1d) and _plain(part) and traced.along(node) == Along(0, 1):
            followed = _to_maximum(traced, node)
            if followed is not None:
                found[node] = followed
    return found


def _plain(part: nn.Conv1d) -> bool:
    if type(part) not in (nn.Conv1d, WordConvolution):
        return False
    window = part.stride, part.dilation, part.groups, part.padding_mode
    return window == ((1,), (1,), 1, "zeros") and part.padding in ((0,), "valid") and part.weight.requires_grad


def _to_maximum(traced: Traced, convolution: fx.Node) -> tuple[list[fx.Node], bool] | None:
    """The nodes from a convolution to the maximum, each the only reader of the one before, and whether one is ReLU."""
    passed: list[fx.Node] = []
    node, cut = convolution, False
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        value = traced.examples[before][0]
        passed.append(node)
        if isinstance(value, tuple):
            return (passed, cut) if _takes_first(node) else None
        if is_relu(traced, node):
            cut = True
        elif not _is_maximum(traced, node):
            return None
        elif isinstance(traced.examples[node][0], Tensor):
            return passed, cut
    return None


RELUS = functional.relu, torch.relu, torch.relu_, "relu", "relu_"
MAXIMA = torch.max, "max", functional.max_pool1d, torch.max_pool1d, functional.adaptive_max_pool1d
POOLS = nn.MaxPool1d, nn.AdaptiveMaxPool1d


def _is(traced: Traced, node: fx.Node, functions: tuple[Any, ...], *layers: type[nn.Module]) -> bool:
    """Whether a node calls one of torch's functions, or one of its layers: not something of the same name."""
    if node.op == "call_module":
        return type(traced.part(node)) in layers
    return node.target in functions


def is_relu(traced: Traced, node: fx.Node) -> bool:
    """Whether a node is ReLU, in any of the ways to call it."""
    return _is(traced, node, RELUS, nn.ReLU)


def _takes_first(node: fx.Node) -> bool:
    return node.target in (operator.getitem, getattr) and node.args[1:] in ((0,), ("values",))


def _is_maximum(traced: Traced, node: fx.Node) -> bool:
    """Whether a node is the maximum over all positions: tried on texts with a single 1, at each position in turn."""
    if len(node.all_input_nodes) != 1 or not _is(traced, node, MAXIMA, *POOLS):
        return False
    example = traced.examples[node.all_input_nodes[0]][0]
    alone = torch.eye(example.shape[2], dtype=example.dtype, device=example.device).unsqueeze(1).repeat(1, 2, 1)
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: alone)
    reader: Any = node.target
    if isinstance(reader, str):
        reader = traced.part(node) if node.op == "call_module" else getattr(Tensor, reader)
    made = reader(*args, **kwargs)
    one = made[0] if isinstance(made, tuple) else made
    return one.numel() == 2 * len(alone) and one.shape[:2] == alone.shape[:2] and bool((one == 1).all())
