"""Test of a batched form against the module itself: two clients with different parameters, one with fewer samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedmpi.common.arithmetic import full_precision
from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked.base import Ahead, Drift, NotStackable, Op, Place, Slot, Step, Workspace
from fedmpi.models.stacked.chain import StackedNet
from fedmpi.models.stacked.graph import GraphOp, dropouts_of
from fedmpi.models.stacked.text import EmbeddingOp, Tables
from fedmpi.models.stacked.trace import DROPOUTS, made_up

ROWS = 3
COUNTS = 3, 2
"""Samples of the two clients; the second client's batch is filled up."""
TOLERANCE = {torch.float64: 1e-9}
"""Largest relative difference of outputs and gradients; 2e-3 in single precision."""


class TwoClients:
    """Parameters of two clients (2, d) as a stack, with the targets of their gradients (`base.Parameters`)."""

    def __init__(self, net: StackedNet, flat: Tensor):
        self.step, self.drift = Step(keep=0, rate=1), Drift()
        self.ahead: Ahead | None = None
        self.values = torch.zeros(2, net.stack_size, dtype=flat.dtype, device=flat.device)
        self.gradients = torch.zeros_like(self.values)
        for slot in net.slots:
            for client in (0, 1):
                slot.of_stack(self.values[client : client + 1], slot.arranged)[0].copy_(slot.from_flat(flat[client]))

    def value(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self.values, shape)

    def target(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self.gradients, shape)


def check_form(net: StackedNet, copied: nn.Module, description: DataDescription) -> None:
    """Compare outputs and gradients of a batched form with those of a copy of the module, without dropout."""
    parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    for part in copied.modules():
        if isinstance(part, DROPOUTS):
            part.p = 0.0
    own = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in parameters])
    generator = torch.Generator().manual_seed(0)
    spread = 0.3 * (own.abs().mean() + 1e-3)
    flat = torch.stack([own, own + spread * torch.randn(own.shape, generator=generator, dtype=own.dtype)])
    flat = flat.to(parameters[0].device)
    samples = [made_up(copied, description, ROWS + client)[:count] for client, count in enumerate(COUNTS)]
    outputs = math.prod(description.output_shape)
    towards = torch.randn(2, ROWS, outputs, generator=generator, dtype=own.dtype).to(flat.device)
    limit = TOLERANCE.get(own.dtype, 2e-3)
    with full_precision():
        found = _stacked(net, flat, samples, towards)
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
    sizes = [parameter.numel() for parameter in parameters]
    with torch.no_grad():
        for parameter, values in zip(parameters, torch.split(flat, sizes), strict=True):
            parameter.copy_(values.view(parameter.shape))
    with torch.enable_grad():
        outputs = module(samples).reshape(len(samples), -1)
        gradients = torch.autograd.grad((outputs * towards).sum(), parameters, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    whole = [torch.zeros_like(one) if gradient is None else gradient.to_dense() for gradient, one in pairs]
    return outputs.detach(), torch.cat([gradient.reshape(-1) for gradient in whole])


def _stacked(net: StackedNet, flat: Tensor, samples: list[Tensor], towards: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the same as `_alone` for both clients, by the batched form."""
    values, workspace, embedding = TwoClients(net, flat), Workspace(flat.dtype, flat.device), net.embedding
    tables = None
    if embedding is not None:
        tables = Tables(samples, embedding.weight.from_flat(flat[0]))
        for client, words in enumerate(tables.of_clients):
            tables.values[words] = embedding.weight.from_flat(flat[client])[tables.rows[words]]
    dtype = torch.int64 if net.reads_words else flat.dtype
    x = torch.zeros(2, ROWS, math.prod(net.feature_shape), dtype=dtype, device=flat.device)
    for client, rows in enumerate(samples if tables is None else tables.ids):
        x[client] = rows[0].reshape(-1)
        x[client, : len(rows)] = rows.reshape(len(rows), -1)
    ops: list[Op] = []
    current = x
    for number, layer in enumerate(net.layers):
        ops.append(layer.bind(Place(2, ROWS, workspace, values, number, number <= net.first_trained), current))
        current = ops[-1].output
    if tables is not None and isinstance(ops[0], EmbeddingOp) and isinstance(ops[1], GraphOp):
        ops[0].table, ops[0].target, ops[0].words = tables.values, tables.gradient, tables.rows
        ops[1].tokens = x, tables.rows
    gradient = towards.clone()
    gradient[1, COUNTS[1] :] = 0
    with torch.no_grad():
        for op in ops:
            for dropout in dropouts_of(op):
                dropout.keep_all()
            op.forward()
        outputs = current.clone()
        for op in reversed(ops[net.first_trained :]):
            gradient = op.backward(gradient)
    found = []
    for client, count in enumerate(COUNTS):
        own = torch.zeros_like(flat[0])
        for slot in net.slots:
            slot.from_flat(own).copy_(slot.of_stack(values.gradients[client : client + 1], slot.arranged)[0])
        if tables is not None and embedding is not None:
            words = tables.of_clients[client]
            embedding.weight.from_flat(own)[tables.rows[words]] = tables.gradient[words]
        found.append((outputs[client, :count], own))
    return found
