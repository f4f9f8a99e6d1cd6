"""A stacked form tried against the module itself: two clients of unlike values, one with fewer samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.arithmetic import explained_by_rounding, full_precision
from fedmpi.data.schema import DataDescription
from fedmpi.models.dropout import ClientMasks, Dropout, Masks, NoMasks
from fedmpi.models.dropout_calls import DropoutCalls
from fedmpi.models.stacked.base import Ahead, Drift, NotStackable, Op, Place, Slot, Step, Workspace
from fedmpi.models.stacked.graph import GraphOp, dropouts_of
from fedmpi.models.stacked.sequence import StackedNet
from fedmpi.models.stacked.text import EmbeddingOp, Tables
from fedmpi.models.stacked.trace import DROPOUTS, made_up
from fedmpi.models.stacked.undone import Left

ROWS = 3
COUNTS = 3, 2
"""Samples of the two clients; the second one's batch is filled up."""
TOLERANCE = {torch.float64: 1e-9}
"""Largest relative difference of outputs and gradients; 2e-3 in single precision, of values that are made up. A larger
one is accepted where rounding explains it."""


class _Values:
    """Two clients' values, and beside them where their gradients go."""

    def __init__(self, net: StackedNet, flat: Tensor):
        self.step, self.drift = Step(keep=0, rate=1), Drift()
        self.ahead: Ahead | None = None
        self.values = torch.zeros(2, net.stack_size, dtype=flat.dtype, device=flat.device)
        self.gradients = torch.zeros_like(self.values)
        for slot in net.slots:
            for client in (0, 1):
                part = self.values[client : client + 1]
                slot.of_stack(part, slot.arranged)[0].copy_(slot.from_flat(flat[client]))

    def value(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self.values, shape)

    def target(self, slot: Slot, *shape: int) -> Tensor:
        return slot.of_stack(self.gradients, shape)


def check_form(net: StackedNet, module: nn.Module, description: DataDescription) -> None:
    """Compare outputs and gradients of a stacked form with the module's own."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(0)
    own = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in parameters])
    counts = [parameter.numel() for parameter in parameters]
    spread = own.abs().mean() + 1e-3
    flat = torch.stack([own, own + 0.3 * spread * torch.randn(own.shape, generator=generator, dtype=own.dtype)])
    flat = flat.to(parameters[0].device)
    samples = [made_up(module, description, ROWS + client)[:count] for client, count in enumerate(COUNTS)]
    outputs = math.prod(description.output_shape)
    towards = torch.randn(2, ROWS, outputs, generator=generator, dtype=own.dtype).to(flat.device)
    was_training, left = module.training, Left(module)
    limit = TOLERANCE.get(own.dtype, 2e-3)
    try:
        forked = torch.random.fork_rng(devices=[flat.device] if flat.is_cuda else [])
        with _dropout(module.train()) as (masks, drops), forked, full_precision():

            def alone(client: int, values: Tensor) -> tuple[Tensor, Tensor]:
                masks.source = ClientMasks(partial(_stream, client)) if drops else NoMasks()
                with DropoutCalls(masks):
                    return _own(module, values, samples[client], towards[client])

            expected = [alone(client, flat[client]) for client in (0, 1)]
            found = _stacked(net, flat, samples, towards, drops)
            for client in (0, 1):
                _compare(found[client], expected[client], limit, partial(alone, client), flat[client], module)
    except NotStackable:
        raise
    except Exception as error:  # whatever the form cannot do, the sequential engine can
        first = str(error).splitlines()[0] if str(error) else ""
        raise NotStackable(f"{type(module).__name__}, tried side by side: {type(error).__name__}: {first}") from error
    finally:
        left.undo()
        module.train(was_training)
    for client in (0, 1):
        whole = float(expected[client][1].norm())
        for mine, theirs in zip(*(torch.split(some[client][1], counts) for some in (found, expected)), strict=True):
            if not theirs.any() and not float(mine.norm()) <= limit * whole / 100:
                raise NotStackable(f"{type(module).__name__}, tried side by side, trains what it does not train alone")


def _compare(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    limit: float,
    alone: Callable[[Tensor], tuple[Tensor, Tensor]],
    values: Tensor,
    module: nn.Module,
) -> None:
    """Refuse outputs or gradients of one client that lie further apart than the limit and than rounding explains."""
    for part, what in enumerate(("outputs", "gradients")):
        difference = _relative_difference(found[part], expected[part])
        if difference <= limit:
            continue

        def moved(beside: Tensor, part: int = part) -> float:
            return _relative_difference(alone(beside)[part], expected[part])

        if not explained_by_rounding(difference, moved, values):
            raise NotStackable(
                f"{type(module).__name__}, tried side by side, gives other {what} (by {difference:.1g}) than "
                "alone: its samples see one another"
            )


def _relative_difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _own(module: nn.Module, flat: Tensor, samples: Tensor, towards: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of one client and the gradient of Σ outputs · towards."""
    values, place = {}, 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            count = parameter.numel()
            values[id(parameter)] = flat[place : place + count].view(parameter.shape).clone().requires_grad_()
            place += count
    with _given(module, values):
        outputs = module(samples).reshape(len(samples), -1)
        total = (outputs * towards[: len(samples)]).sum()
        gradients = torch.autograd.grad(total, list(values.values()), allow_unused=True)
    pairs = zip(gradients, values.values(), strict=True)
    parts = [torch.zeros_like(value) if one is None else one.to_dense() for one, value in pairs]
    return outputs.detach(), torch.cat([part.reshape(-1) for part in parts])


@contextmanager
def _given(module: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Within: the module computes with these values of its parameters (by id).

    torch.func.functional_call would not give the parameters of a layer that has several names (`self.conv` that also is
    part of `self.layers`) back to it.
    """
    held: list[tuple[Any, dict[str, Any]]] = [(part._parameters, dict(part._parameters)) for part in module.modules()]
    try:
        for now, own in held:
            now.update({name: values[id(one)] for name, one in own.items() if id(one) in values})
        yield
    finally:
        for now, own in held:
            now.update(own)


def _stacked(
    net: StackedNet, flat: Tensor, samples: list[Tensor], towards: Tensor, drops: bool
) -> list[tuple[Tensor, Tensor]]:
    """As `_own`, of both clients by the stacked form."""
    values, workspace = _Values(net, flat), Workspace(flat.dtype, flat.device)
    embedding = net.embedding
    tables = None
    if embedding is not None and embedding.weight is not None:
        tables = Tables(samples, embedding.weight.from_flat(flat[0]))
        for client in (0, 1):
            own = slice(tables.bounds[client], tables.bounds[client + 1])
            tables.values[own] = embedding.weight.from_flat(flat[client])[tables.rows[own]]
    read = samples if tables is None else tables.ids
    dtype = torch.int64 if net.reads_words else flat.dtype
    x = torch.zeros(2, ROWS, math.prod(net.feature_shape), dtype=dtype, device=flat.device)
    for client, (count, rows) in enumerate(zip(COUNTS, read, strict=True)):
        x[client, :count] = rows.reshape(count, -1).to(dtype)
        x[client, count:] = x[client, 0]
    ops: list[Op] = []
    current = x
    for number, layer in enumerate(net.layers):
        ops.append(layer.bind(Place(2, ROWS, workspace, values, number, number <= net.first_trained), current))
        current = ops[-1].output
    if tables is not None and isinstance(ops[0], EmbeddingOp):
        ops[0].table, ops[0].target, ops[0].words = tables.values, tables.gradient, tables.rows
        if isinstance(ops[1], GraphOp):
            ops[1].tokens = x, tables.rows
    gradient = towards.clone()
    gradient[1, COUNTS[1] :] = 0
    streams = [_stream(client) for client in (0, 1)]
    with torch.no_grad():
        for op in ops:
            for dropout in dropouts_of(op):
                dropout.keep_all()
                for client, count in enumerate(COUNTS if drops else ()):
                    dropout.draw(client, count, streams[client])
            op.forward()
        outputs = current.clone()
        for op in reversed(ops[net.first_trained :]):
            gradient = op.backward(gradient)
    found = []
    for client, count in enumerate(COUNTS):
        of_client = torch.zeros_like(flat[0])
        for slot in net.slots:
            slot.from_flat(of_client).copy_(slot.of_stack(values.gradients[client : client + 1], slot.arranged)[0])
        if tables is not None and embedding is not None and embedding.weight is not None:
            own = slice(tables.bounds[client], tables.bounds[client + 1])
            embedding.weight.from_flat(of_client)[tables.rows[own]] = tables.gradient[own]
        found.append((outputs[client, :count], of_client))
    return found


def _stream(client: int) -> np.random.Generator:
    """Where a client's masks come from."""
    return np.random.Generator(np.random.Philox(client))


@contextmanager
def _dropout(module: nn.Module) -> Iterator[tuple[Masks, bool]]:
    """Within: what serves the model's dropout, and whether it drops; not where some layers are torch's own, which then
    pass everything on."""
    layers = [layer for layer in module.modules() if isinstance(layer, DROPOUTS)]
    own = [layer for layer in layers if isinstance(layer, Dropout)]
    drops = len(own) == len(layers)
    masks = own[0].masks if own else Masks()
    chances, source = [layer.p for layer in layers], masks.source
    for layer in layers:
        layer.p = layer.p if drops else 0.0
    try:
        yield masks, drops
    finally:
        for layer, p in zip(layers, chances, strict=True):
            layer.p = p
        masks.source = source
