"""A model as one flat vector, which is communicated, averaged, and changed in place by the local steps."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.arithmetic import add_rows
from fedmpi.common.calling import kept_generators, seed_generators
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component, resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.models import Copies, build
from fedmpi.models.inputs import adapted, as_written
from fedmpi.models.isolation import (
    check_memory,
    has_hooks,
    integer_buffers,
    is_plain,
    maker_of,
    seed_held_generators,
    travelling_buffers,
)
from fedmpi.models.layers import Masks, SentMasks, client_masks, has_dropout, install_dropout, no_masks, remove_dropout
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription, Input

OwnLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
SPARSE_ABOVE = 4
"""Embedding rows per token of a batch above which gradients of the tables are sparse; below, dense is as fast."""


class FlatModel:
    """Module whose values are views of one flat vector: trainable parameters first, then the float buffers.

    Buffers such as batch norm's statistics are communicated and averaged like parameters. The vector excludes values
    that never change or cannot be averaged: frozen parameters (requires_grad = False), integer buffers, float buffers
    that are not finite, non-persistent buffers. Integer buffers of the state dict, such as batch norm's number of
    batches, are combined by their maximum. The module's dropout layers become those of `models.layers`.

    Parameters and buffers that match a pattern of `personal` by name or layer class stay on the clients. Then `size`,
    `trainable`, `initial` and `layout` describe the shared values, which are communicated. The module is bound to the
    whole vector: personal parameters, shared parameters, shared buffers, personal buffers; see `joined`.

    Of several copies of a model (`models.Copies`), passes use the `active` one. `active` is read by `begin`.

    Calling `module` with packed samples (`data.inputs`) gives it its arrays, and returns the logits of its outputs.

    A plain module (`models.isolation`) is always the same object. For any other one, `begin` makes a fresh `module`.
    Its forward pass may store values elsewhere (`self.mean = 0.9 * self.mean + …`, `self.fc.weight.data = …`); they are
    copied into the flat vector when the gradient is known.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        loss: Loss = CROSS_ENTROPY,
        part: Component | None = None,
        rebuild: Callable[[], nn.Module] | None = None,
        personal: Sequence[str] = (),
        inputs: tuple[Input, ...] = (),
    ):
        check_memory(module)
        self._patterns = personal
        self.loss, self.part, self.device = loss, part, torch.device(device)
        self.plain, self.hooked = is_plain(module), has_hooks(module)
        self.pure = self.plain and not loss.part.foreign  # a step depends on its samples, parameters and masks alone
        self.inputs, self.adapts = inputs, bool(inputs)
        self.masks, self.sent = Masks(), SentMasks(self.device)
        self.stacked_forms: dict[Any, Any] = {}
        self.least = 1
        self.copies = len(module) if isinstance(module, Copies) else 0
        self.active: int | None = None  # copy that passes use; None for their mean
        self.clients_at_once = 0  # how many a GPU trains as one batch in this run; 0 = undecided
        prepared = partial(_prepared, masks=self.masks, device=self.device)
        self._pristine = prepared(module)
        self._fresh = maker_of(module, rebuild and (lambda: prepared(rebuild())), self.masks)
        self._viewed: tuple[Tensor, list[Tensor]] | None = None
        self._hold(module if self.plain else self._fresh())
        self._integers = [_at(place).clone() for place in self._counted]
        self.noted = [one.clone() for one in self._integers]  # largest of the clients of this round
        if not self.parameters:
            raise UserError("the model has no trainable parameters. Set requires_grad of at least one")
        self.dtype, kinds = self.parameters[0].dtype, {value.dtype for value in self._values}
        if len(kinds) > 1 or self.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"the model's values are {' and '.join(sorted(map(str, kinds)))}, which no engine trains. Build all in "
                "float32, and call its layers in a torch.autocast block for products in lower precision"
            )
        before, self.trainable, buffers, after = (sum(map(Tensor.numel, part)) for part in self._parts(self.module))
        self.size, self.trained, self.personal = self.trainable + buffers, before + self.trainable, before + after
        self.shared = slice(before, before + self.size)
        """Positions of the shared values in the whole vector; its first `trained` values change in local steps."""
        self._check_patterns(self.module)
        self.has_buffers, self.has_dropout = buffers > 0, has_dropout(module)
        self.whole = torch.cat([value.detach().reshape(-1) for value in self._values])
        """Initial values of the whole vector."""
        self.initial = self.whole[self.shared]

    @classmethod
    def built(
        cls,
        name: Any,
        options: Mapping[str, Any],
        description: DataDescription,
        seed: int,
        device: torch.device | str = "cpu",
        loss: Loss = CROSS_ENTROPY,
        personal: Sequence[str] = (),
    ) -> FlatModel:
        """Build the freshly initialized model of a configuration."""
        make, part = partial(build, name, options, description, seed), resolve("model", name)
        return cls(make(), device, loss, part if part.foreign else None, make, personal, description.inputs)

    def _hold(self, module: nn.Module) -> None:
        """Make this the current module."""
        self.module = adapted(module, self.inputs) if self.adapts else module
        own, shared, buffers, own_buffers = self._parts(module)
        self.parameters, self.buffers = own + shared, buffers + own_buffers
        self.own_parameters = len(own)
        self._values = self.parameters + self.buffers
        self._counts = [(one, one.clone()) for one in module.buffers() if not one.is_floating_point()]
        self._counted = integer_buffers(module)
        self.embeddings = [
            part
            for part in module.modules()
            if type(part) is nn.Embedding and part.weight.requires_grad and part.max_norm is None
            if not part.scale_grad_by_freq
        ]
        self._bound: Tensor | None = None
        self._views: list[Tensor] = []
        kept = {id(buffer) for buffer in self.buffers}
        places = [(part._buffers, name, one) for part in module.modules() for name, one in part._buffers.items()]
        self._places = [(held, name, one) for held, name, one in places if one is not None and id(one) in kept]

    def _parts(self, module: nn.Module) -> list[list[Tensor]]:
        """Return a module's personal parameters, shared parameters, shared buffers and personal buffers."""
        parts: list[list[Tensor]] = [[], [], [], []]
        own: set[int] = set()
        for layer, part in module.named_modules() if self._patterns else ():
            for name, one in (*part._parameters.items(), *part._buffers.items()):
                if any(_matches(pattern, part, f"{layer}.{name}".lstrip(".")) for pattern in self._patterns):
                    own.add(id(one))
        for one in module.parameters():
            if one.requires_grad:
                parts[id(one) not in own].append(one)
        for one in travelling_buffers(module):
            parts[2 + (id(one) in own)].append(one)
        return parts

    def _check_patterns(self, module: nn.Module) -> None:
        """Reject patterns of personal values that match nothing, or leave no parameter to share."""
        names = {id(one): name for name, one in (*module.named_parameters(), *module.named_buffers())}
        listed = {names[id(one)]: module.get_submodule(names[id(one)].rpartition(".")[0]) for one in self._values}
        for pattern in self._patterns:
            if not any(_matches(pattern, part, name) for name, part in listed.items()):
                raise UserError(
                    f"local.personal = {pattern!r} matches no trainable parameter and no float buffer of the model. "
                    f"Choose from {', '.join(listed)}"
                )
        if not self.trainable:
            raise UserError("local.personal matches all trainable parameters of the model. Leave some to share")

    @cached_property
    def frozen_checksum(self) -> int:
        """Return a checksum of constant parameters and float buffers, which are not communicated; 0 without any."""
        travelling = set(map(id, travelling_buffers(self._pristine)))
        checksum = 0
        for value in (*self._pristine.parameters(), *self._pristine.buffers()):
            if value.is_floating_point() and not value.requires_grad and id(value) not in travelling:
                checksum = zlib.crc32(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, checksum)
        return checksum

    def begin(self, flat: Tensor) -> None:
        """Reset the module to a whole vector, which steps then change in place, or to shared values (d,)."""
        if not self.plain:
            self._hold(self._fresh())
            self.module.train()  # it may leave layers in evaluation mode
        if isinstance(self.module, Copies):
            self.module.active = self.active
        for count, first in self._counts:
            count.copy_(first)
        for place, value in zip(self._counted, self._integers, strict=True):
            _at(place).copy_(value)
        self.loss.begin()
        self.bind(self.joined(flat) if len(flat) == self.size else flat)

    def joined(self, shared: Tensor, personal: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return the whole vector of shared values (d,) and personal ones (p,), by default the initial ones.

        It is `out`, if that is given, and without personal values otherwise `shared` itself.
        """
        if not self.personal:
            return shared if out is None else out.copy_(shared)
        whole = self.whole.clone() if out is None else out.copy_(self.whole)
        whole[self.shared] = shared
        if personal is not None:
            before = self.shared.start
            whole[:before], whole[self.shared.stop :] = personal[:before], personal[before:]
        return whole

    def personal_of(self, whole: Tensor) -> Tensor:
        """Return a copy of the personal values (p,) in a whole vector."""
        return torch.cat([whole[: self.shared.start], whole[self.shared.stop :]])

    @cached_property
    def order(self) -> Tensor:
        """Return the position in the whole vector of each value in the module's own order, parameters first."""
        counts = [value.numel() for value in self._values]
        places = dict(zip(map(id, self._values), torch.split(torch.arange(len(self.whole)), counts), strict=True))
        own = [one for one in self.module.parameters() if one.requires_grad] + travelling_buffers(self.module)
        return torch.cat([places[id(one)] for one in own]).to(self.device)

    def reset_integers(self) -> None:
        """Forget the integer buffers of earlier clients."""
        for noted, value in zip(self.noted, self._integers, strict=True):
            noted.copy_(value)

    def note_integers(self, left: Sequence[Tensor] | None = None) -> None:
        """Note the integer buffers after a client's training; by default those of the module."""
        found = [*map(_at, self._counted)] if left is None else left
        for noted, value in zip(self.noted, found, strict=True):
            noted.copy_(torch.maximum(noted, value))

    def combine_integers(self, maxima: Callable[[Ints], Ints]) -> None:
        """Set the integer buffers of the global model, given a function that returns the largest of all ranks."""
        if self.noted:
            self._set_integers(maxima(_joined(self.noted).numpy()))

    def _set_integers(self, values: Ints) -> None:
        parts = np.split(values, np.cumsum([one.numel() for one in self._integers])[:-1])
        for one, part in zip(self._integers, parts, strict=True):
            one.copy_(torch.from_numpy(part).view(one.shape))

    def state(self) -> dict[str, Tensor]:
        """Return the integer buffers of the global model, for a checkpoint."""
        return {"integers": _joined(self._integers)} if self._integers else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the integer buffers of a checkpoint."""
        if "integers" in state and self._integers:
            self._set_integers(state["integers"].cpu().numpy())

    def look(self, flat: Tensor) -> None:
        """Reset as in `begin`, for passes that must not change `flat`: modules that are not plain get a copy of it."""
        self.begin(flat if self.plain else flat.clone())

    def begin_training(self, values: Tensor, streams: Streams, round: int, client: int, dropout: bool = True) -> None:
        """Reset the module to training mode at `values` (d,), with masks of dropout from the client's stream."""
        self.begin(values)
        if not self.module.training:
            self.module.train()
        stream = partial(streams.generator, Purpose.DROPOUT, round, client)
        self.masks.source = client_masks(stream) if dropout else no_masks
        if dropout and self.has_dropout and self.device.type != "cpu":
            self.masks.source = self.sent.open([stream()])

    @contextmanager
    def evaluating(
        self, values: Tensor, streams: Streams, purpose: Purpose, round: int, client: int
    ) -> Iterator[nn.Module]:
        """Reset the module to evaluation mode at `values` (d,), which are not changed, within the context.

        All draws, masks of dropout included, come from the stream (purpose, round, client).
        """
        self.look(values)
        self.module.eval()
        masks = client_masks(partial(streams.generator, purpose, round, client))
        with self.masks.given_by(masks), self.seeded(streams, round, client, purpose):
            yield self.module

    @contextmanager
    def seeded(
        self, streams: Streams, round: int, client: int, purpose: Purpose = Purpose.MODULE, more: bool = False
    ) -> Iterator[None]:
        """Seed global generators and those of the module from the stream (purpose, round, client) within the context.

        Plain modules and built-in losses draw from none of them: they are seeded with `more` only.
        """
        if self.pure and not more:
            yield
            return
        with kept_generators():
            seed = streams.seed64(purpose, round, client)
            seed_generators(seed)
            seed_held_generators(self.module, seed)
            yield

    def bind(self, flat: Tensor) -> None:
        """Make the module's parameters and float buffers views of `flat` (d,); nothing is copied."""
        if flat.shape != self.whole.shape or not flat.is_contiguous():
            raise ValueError(f"a contiguous vector of {len(self.whole)} values is needed, not {tuple(flat.shape)}")
        if flat is self._bound:
            return
        self._views = self._cut(flat.detach())
        for value, view in zip(self._values, self._views, strict=True):
            value.data = view
        self._bound = flat

    def collect(self, by: str = "the model's forward pass") -> None:
        """Copy values that were replaced or moved to other memory into the bound vector."""
        for buffers, name, buffer in self._places:
            new = buffers[name] if name in buffers else None  # noqa: SIM401 (TorchScript's have no get)
            if new is not buffer and new is not None:
                buffer.data, buffers[name] = new.detach(), buffer
        pairs = zip(self._values, self._views, strict=True)
        moved = [(value, view) for value, view in pairs if value.data_ptr() != view.data_ptr()]
        for value, view in moved:
            if value.shape != view.shape:
                raise UserError(
                    f"{by} gives a parameter or buffer of the model the shape {tuple(value.shape)}, but it must stay "
                    f"{tuple(view.shape)}. Register a buffer of varying shape with persistent=False"
                )
        now = [value.detach().clone() for value, _ in moved]  # the memory of one may now be that of another
        for (value, view), new in zip(moved, now, strict=True):
            view.copy_(new)
            value.data = view

    def released(self) -> nn.Module:
        """Return the module as a plain torch module: with its own tensors in host memory, in evaluation mode.

        The flat model cannot be used afterwards.
        """
        for tensor in self._values:
            tensor.data = tensor.data.clone()
        return _as_given(self.module).to("cpu")

    def copy(self, values: Tensor, state: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a plain torch module with the values (d,), in host memory and in evaluation mode.

        Its integer buffers are the present ones, or those of an earlier `state`.
        """
        present = self.state()
        self.load(state or {})
        self.look(values)
        made = self._fresh()
        own = [one for part in self._parts(made) for one in part]
        for value, view in zip(own, self._cut(self.joined(values)), strict=True):
            value.data = view.clone()
        for place, number in zip(integer_buffers(made), self._integers, strict=True):
            _at(place).copy_(number)
        self.load(present)
        return _as_given(made).to("cpu")

    @property
    def layout(self) -> dict[str, slice]:
        """Return the positions of every shared trainable parameter and buffer in the flat vector (d,)."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        names = {id(value): name for name, value in named}
        _, parameters, buffers, _ = self._parts(self.module)
        shared = parameters + buffers
        ends = accumulate(value.numel() for value in shared)
        return {names[id(value)]: slice(end - value.numel(), end) for value, end in zip(shared, ends, strict=True)}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return parameter-shaped views of a whole vector, or of a vector (t,) of what local steps change."""
        if self._viewed is None or self._viewed[0] is not flat:
            self._viewed = flat, self._cut(flat.detach())[: len(self.parameters)]
        return self._viewed[1]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        values = self.parameters if flat.numel() == self.trained else self._values
        parts = torch.split(flat, [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    def loss_gradient(
        self, x: Tensor, y: Tensor, loss_of: OwnLoss | None = None, factor: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the mean loss of a batch at the bound values, or `loss_of(module, x, y)`, and factor · gradient."""
        loss = self.loss.mean(self._logits(x), y) if loss_of is None else loss_of(self.module, x, y)
        gradients = self._gradients(loss, factor)
        return loss.detach(), gradients

    def weighted_gradient(self, x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the losses ℓ_i (b,) of a batch, detached, and the gradient of Σ weights_i ℓ_i, one per parameter."""
        losses = self.loss.per_sample(self._logits(x), y)
        gradients = self._gradients(losses, weights)
        return losses.detach(), gradients

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x)
        return logits.to(self.dtype)

    def _gradients(self, of: Tensor, weights: Tensor | None = None) -> Sequence[Tensor | None]:
        """Return the gradients of a loss or of weighted losses with respect to the parameters."""
        if self.plain:
            return torch.autograd.grad(of, self.parameters, weights, allow_unused=True)
        source = self.masks.source
        with self.masks.given_by(source if source is no_masks else None):  # other masks than in the forward pass
            gradients = torch.autograd.grad(of, self.parameters, weights, allow_unused=True)
        if self._views:
            self.collect()
        return gradients

    def sparse_pays(self, tokens: int) -> bool:
        """Check whether batches of so many tokens use few enough rows of the embedding tables for sparse gradients."""
        return sum(table.num_embeddings for table in self.embeddings) > SPARSE_ABOVE * tokens

    @contextmanager
    def sparse_embeddings(self, enabled: bool = True) -> Iterator[None]:
        """Make gradients of the embedding tables sparse tensors of the used rows within the context."""
        before = [table.sparse for table in self.embeddings]
        for table in self.embeddings:
            table.sparse = enabled
        try:
            yield
        finally:
            for table, sparse in zip(self.embeddings, before, strict=True):
                table.sparse = sparse


def _matches(pattern: str, part: nn.Module, name: str) -> bool:
    """Check whether a pattern matches the name of a layer's value, or the class of the layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(type(part).__name__, pattern)


def _at(place: tuple[dict[str, Tensor | None], str]) -> Tensor:
    """Return the buffer at a place, which a forward pass may have replaced."""
    held, name = place
    buffer = held[name]
    assert buffer is not None
    return buffer


def _joined(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1).long().cpu() for one in buffers])


def _prepared(module: nn.Module, masks: Masks, device: torch.device) -> nn.Module:
    """Return the module on the device, with fedmpi's dropout."""
    install_dropout(module, masks)
    return module.to(device)


def _as_given(module: nn.Module) -> nn.Module:
    """Return the module in evaluation mode with its own class and torch's own dropout."""
    remove_dropout(module)
    return as_written(module).eval()


def add_gradients(views: list[Tensor], gradients: Sequence[Tensor | None], alpha: float) -> None:
    """Compute views += alpha · gradients in place, skipping missing gradients. A sparse gradient (from an embedding)
    changes its rows only."""
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    dense = [pair for pair in pairs if not pair[1].is_sparse]
    if dense:
        torch._foreach_add_([view for view, _ in dense], [gradient for _, gradient in dense], alpha=alpha)
    for view, gradient in pairs if len(dense) < len(pairs) else ():
        if gradient.is_sparse:
            add_rows(view, gradient._indices()[0], gradient._values(), alpha)
