"""In which places of a traced model ReLU and sums may write their result over an operand: no new memory, the same bits.

The operand must be no view, must be read by this node alone, and no backward pass may need it: convolutions and norms
keep their input for their gradient, products their operands, but none of them its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection

import torch
from torch import Tensor, fx

from fedmpi.models.stacked.forms import ELEMENT_BY_ELEMENT
from fedmpi.models.stacked.peaks_of_graph import is_relu
from fedmpi.models.stacked.trace import Traced

SUMS = operator.add, torch.add, "add"
OWN_SUMS = operator.iadd, "add_"
"""Sums that the module itself writes into their first operand."""


def rectified(x: Tensor) -> Tensor:
    """ReLU written over x; not where x is a view, since autograd makes a copy of what is written through one."""
    return torch.relu(x) if x._is_view() else torch.relu_(x)


def added(x: Tensor, y: Tensor) -> Tensor:
    """x + y written over x, with the same exception as in `rectified`."""
    return torch.add(x, y) if x._is_view() else x.add_(y)


def gives_its_own(traced: Traced, node: fx.Node) -> bool:
    """Whether a node without parameters makes a new tensor that its own backward pass does not read."""
    simple = node.op != "call_module" and node.target in ELEMENT_BY_ELEMENT
    return simple and traced.tensor(node) is not None and "out" not in node.kwargs


def overwriting(
    traced: Traced, node: fx.Node, own: Collection[fx.Node]
) -> tuple[Callable[..., Tensor], list[fx.Node]] | None:
    """The function that computes a node over its first operand, and the operands; None where that may not be done."""
    free = [given for given in node.all_input_nodes if given in own and list(given.users) == [node]]
    if not free:
        return None
    if is_relu(traced, node):
        return rectified, free
    if node.op == "call_module" or node.kwargs or len(node.args) != 2 or len(node.all_input_nodes) != 2:
        return None
    free = free if node.target in SUMS else [one for one in free if node.target in OWN_SUMS and one is node.args[0]]
    result = traced.tensor(node)
    for one in free:
        given = traced.tensor(one)
        if result is not None and given is not None and (given.shape, given.dtype) == (result.shape, result.dtype):
            return added, sorted(node.all_input_nodes, key=lambda other: other is not one)
    return None
