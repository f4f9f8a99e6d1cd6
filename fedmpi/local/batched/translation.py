"""Conversion of a module to its batched form, and the test of the form against the module itself."""

from __future__ import annotations

import copy
import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common.arithmetic import full_precision
from fedmpi.common.calling import kept_generators
from fedmpi.common.errors import raised
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.chain import ROWS, StackedNet, by_hand, trace
from fedmpi.local.batched.graph import graph_net
from fedmpi.local.batched.layers import NotStackable
from fedmpi.local.batched.stack import Stack
from fedmpi.local.batched.update import StackAdam
from fedmpi.local.traits import trial_samples
from fedmpi.local.work import LocalRule

COUNTS = 3, 2
"""Samples of the two clients of a test; the second client's batch is filled up."""
TOLERANCE = {torch.float64: 1e-9}
"""Largest relative difference of outputs and gradients; 2e-3 in single precision."""


def translate(
    module: nn.Module, description: DataDescription, known: MutableMapping[Any, Any] | None = None
) -> StackedNet:
    """Return the batched form of a model, or raise NotStackable; `known` caches it, or the reason why there is none."""
    known = {} if known is None else known
    if description not in known:
        try:
            known[description] = _translated(module, description)
        except NotStackable as reason:
            known[description] = str(reason)
    found: StackedNet | str = known[description]
    if isinstance(found, str):
        raise NotStackable(found)
    return found


def _translated(module: nn.Module, description: DataDescription) -> StackedNet:
    """Return the batched form of the module's forward pass, tested against a copy of the module."""
    with kept_generators():
        try:
            traced = trace(module, copy.deepcopy(module).train(), description)
            try:
                net = by_hand(traced, description)
            except NotStackable:
                net = graph_net(traced, description)
            check_form(net, traced.copied)
            return net
        except NotStackable:
            raise
        except Exception as error:  # the sequential engine supports everything that a form does not
            raise NotStackable(f"{type(module).__name__} has no batched form: {raised(error)}") from error


def check_form(net: StackedNet, copied: nn.Module) -> None:
    """Compare outputs and gradients of a batched form with those of a copy of the module, without dropout.

    There are two clients with different parameters; one has fewer samples.
    """
    parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    own = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in parameters])
    generator = torch.Generator().manual_seed(0)
    spread = 0.3 * (own.abs().mean() + 1e-3)
    flat = torch.stack([own, own + spread * torch.randn(own.shape, generator=generator, dtype=own.dtype)])
    flat = flat.to(parameters[0].device)
    samples = [
        trial_samples(net.description, ROWS + client, parameters[0])[:count] for client, count in enumerate(COUNTS)
    ]
    outputs = math.prod(net.description.output_shape)
    towards = torch.randn(2, ROWS, outputs, generator=generator, dtype=own.dtype).to(flat.device)
    limit = TOLERANCE.get(own.dtype, 2e-3)
    with full_precision():
        found = _batched(net, flat, samples, towards.clone())
        for client, (mine, count) in enumerate(zip(found, COUNTS, strict=True)):
            theirs = _alone(copied, parameters, flat[client], samples[client], towards[client, :count])
            for what, one, other in zip(("outputs", "gradients"), mine, theirs, strict=True):
                difference = float((one - other).norm() / other.norm().clamp_min(1e-12))
                if not difference <= limit:
                    raise NotStackable(
                        f"{type(copied).__name__} gives other {what} (by {difference:.1g}) with several clients at "
                        "once than alone: its samples influence one another, or torch.fx cannot trace what it does"
                    )


def _alone(
    module: nn.Module, parameters: list[nn.Parameter], flat: Tensor, samples: Tensor, towards: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of one client and the gradient of Σ outputs · towards."""
    nn.utils.vector_to_parameters(flat, parameters)
    with torch.enable_grad():
        outputs = module(samples).reshape(len(samples), -1)
        gradients = torch.autograd.grad((outputs * towards).sum(), parameters, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    whole = [torch.zeros_like(one) if gradient is None else gradient.to_dense() for gradient, one in pairs]
    return outputs.detach().cpu(), torch.cat([gradient.reshape(-1) for gradient in whole]).cpu()


def _batched(net: StackedNet, flat: Tensor, samples: list[Tensor], towards: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the same as `_alone` for both clients, by the batched form."""
    stack = Stack(net, 2, ROWS, False, flat.dtype, flat.device)
    with torch.no_grad():
        stack.begin(flat[0])
        read = stack.open(samples, flat[0], StackAdam(LocalRule()))
        for slot in net.slots:
            slot.of_stack(stack.values[1:], slot.arranged)[0].copy_(slot.from_flat(flat[1]))
        if net.embedding is not None and stack.tables is not None:
            words = stack.tables.of_clients[1]
            stack.tables.values[words] = net.embedding.weight.from_flat(flat[1])[stack.tables.rows[words]]
        bound = stack.bound(2, ROWS)
        for client, own in enumerate(read):
            bound.read(client, own, torch.arange(len(own), device=own.device))
        for dropout in bound.dropouts:
            dropout.keep_all()
        bound.forward()
        outputs = bound.output.flatten(2).clone()
        towards[1, COUNTS[1] :] = 0
        bound.backward(towards)
    return [
        (outputs[client, :count].cpu(), gradient)
        for client, (count, gradient) in enumerate(zip(COUNTS, stack.flat_gradients(), strict=True))
    ]
