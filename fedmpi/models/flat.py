"""A model as one flat vector: what travels, what is averaged, what the local steps change in place."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedmpi.common.calling import is_complex, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.generators import held_generators
from fedmpi.common.registry import Part
from fedmpi.models.bound_values import BoundValues
from fedmpi.models.dropout import ComputedAgain, MaskSource, NoMasks, has_dropout, install_dropout, remove_dropout
from fedmpi.models.dropout_calls import DropoutCalls, gradients_within
from fedmpi.models.kept_state import KeptState
from fedmpi.models.shared_memory import SharedBuffers, check_memory
from fedmpi.models.word_convolution import install_word_convolutions, remove_word_convolutions
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss

Precision = Literal["float32", "bfloat16"]

SPARSE_ABOVE = 4
"""Embedding rows per token of a batch above which gradients of the tables are kept sparse; below, dense is as fast."""


class FlatModel:
    """A module whose values are views of one flat vector: trainable parameters first, then the float buffers.

    Buffers such as batch norm's statistics travel and are averaged like parameters, also where the forward pass puts
    new tensors in their places (`self.mean = 0.9 * self.mean + …`): these are copied into the flat vector when the
    gradient is known, as are values that it gives other memory (`self.mean.data = …`). What never changes or cannot be
    averaged stays out: frozen parameters (requires_grad = False), integer buffers (every client starts with their first
    values, see `restart`), float buffers that are not finite, non-persistent buffers. The module's dropout layers are
    swapped for those of `models.dropout`, and its convolutions over words compute as in `models.word_convolution`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        loss: Loss = CROSS_ENTROPY,
        part: Part | None = None,
    ):
        check_memory(module)
        self.shared_buffers = SharedBuffers(module, travelling_buffers(module))
        self.loss, self.part = loss, part
        self.masks = install_dropout(module)
        self.drops = self.calls_dropout = False
        self.dropout_calls = DropoutCalls(self.masks)
        install_word_convolutions(module)
        self.stacked_forms: dict[Any, Any] = {}
        self.module = module.to(device)
        self.device = torch.device(device)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.buffers = travelling_buffers(module)
        values = [*self.parameters, *self.buffers]
        if not self.parameters:
            raise UserError("the model has no trainable parameters: nothing could be learned")
        if any(value.is_complex() for value in values):
            raise UserError(
                "the model has complex parameters, which no engine trains: hold them as pairs of real numbers (..., 2) "
                "and write torch.view_as_complex(parameter) in the forward pass"
            )
        if len({value.dtype for value in values}) > 1:
            kinds = ", ".join(sorted({str(value.dtype) for value in values}))
            raise UserError(f"the model mixes float types ({kinds}): give all parameters and buffers the same")
        self.trainable = sum(p.numel() for p in self.parameters)
        self.size = self.trainable + sum(b.numel() for b in self.buffers)
        self.has_buffers = bool(self.buffers)
        self._has_dropout_layers = has_dropout(module)
        self.dtype = self.parameters[0].dtype
        self.embeddings = _sparse_capable(module)
        self._arithmetic: AbstractContextManager[object] = nullcontext()
        self.generators = held_generators(module)
        self.kept = KeptState(module, values, loss.holders)
        self.bound_values = BoundValues(module, self.parameters, self.buffers)
        self.writes, self.least = False, 1
        self._bound: Tensor | None = None
        self._looked_at: Tensor | None = None
        self._expected: int | None = None
        self._viewed: tuple[Tensor, list[Tensor]] | None = None
        self.initial = torch.cat([value.detach().reshape(-1) for value in values])

    @property
    def has_dropout(self) -> bool:
        """Whether masks are drawn in training mode."""
        return self._has_dropout_layers or self.drops

    @cached_property
    def frozen_checksum(self) -> int:
        """Of the values that neither travel nor change, parameters and float buffers; 0 where there are none."""
        travelling = {id(value) for value in (*self.parameters, *self.buffers)}
        values = (*self.module.parameters(), *self.module.buffers())
        kept = [value for value in values if id(value) not in travelling and value.is_floating_point()]
        checksum = 0
        for value in kept:
            checksum = zlib.crc32(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, checksum)
        return checksum

    def bind(self, flat: Tensor) -> None:
        """Make the module's parameters and float buffers views of `flat` (d,); nothing is copied."""
        if flat.shape != (self.size,) or not flat.is_contiguous():
            raise ValueError(f"a contiguous vector of {self.size} values is needed, not {tuple(flat.shape)}")
        self._looked_at = self._expected = None
        if flat is self._bound:
            self.bound_values.give_again(self.writes)
            return
        self.bound_values.give(self._cut(flat.detach()))
        self._bound = flat

    def bind_to_read(self, flat: Tensor) -> None:
        """As `bind`, for passes that write to no parameter or buffer: `check_bound_values` tells whether they kept to
        that."""
        self.bind(flat)
        self._expected = self._sum_of_values()

    def check_bound_values(self) -> None:
        """Refuse what passes since `bind` have done to parameters, since `bind_to_read` to buffers as well, where the
        trial met no such pass.
        """
        if self.writes:
            return
        if name := self.bound_values.kept_from_before():
            raise UserError(
                f"the model's forward pass gives {name} memory that it lay in before (old = self.{name}.data, later "
                f"self.{name}.data = old), kept where nothing begins anew with every client: keep a copy "
                "(….data.clone()) in an attribute of the model, and copy from it (….data.copy_(old))"
            )
        if self.bound_values.displaced():
            raise UserError(
                "the model's forward pass gives parameters other values (self.fc.weight.data = …) for some batches "
                "only, which its trial before the first round has not met: write self.fc.weight.data.copy_(…)"
            )
        expected, self._expected = self._expected, None
        if expected is not None and self._sum_of_values() != expected:
            raise UserError(
                "the model's forward pass changes parameters or buffers (self.fc.weight.data.clamp_(…)) for some "
                "batches only, which its trial before the first round has not met, and did so to the global model: "
                "have every pass do it, or none in evaluation mode, where training is not merged "
                '(local.engine = "sequential")'
            )

    def _sum_of_values(self) -> int:
        """Of the bits of the bound values."""
        assert self._bound is not None
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.dtype.itemsize]
        return int(self._bound.view(bits).sum(dtype=torch.int64))

    def released(self) -> nn.Module:
        """The module, a torch module like any other again: tensors of its own in host memory, in evaluation mode.

        The flat model is of no more use.
        """
        for tensor in (*self.parameters, *self.buffers):
            tensor.data = tensor.data.clone()
        remove_dropout(self.module)
        remove_word_convolutions(self.module)
        return self.module.to("cpu").eval()

    def bind_to_look(self, flat: Tensor) -> None:
        """As `bind`, for passes that must not change `flat` (d,): of a copy where a forward pass may change float
        buffers or parameters, in evaluation mode, too. Every `restart` makes it the same again."""
        if not self.has_buffers and not self.writes:
            self.bind_to_read(flat)
            return
        self.bind(flat.clone())
        self._looked_at = flat

    def draw_masks_from(self, source: MaskSource) -> None:
        """Have dropout's masks come from this source, until another one is given."""
        self.masks.source = source

    def restart(self) -> None:
        """Begin anew what the module counts and keeps from call to call, such as batch norm's count of batches."""
        self.kept.restart()
        self.bound_values.put_back(self.writes)
        if self._bound is not None and self._looked_at is not None:
            changed = slice(0 if self.writes else self.trainable, None)
            self._bound[changed].copy_(self._looked_at[changed])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Parameter-shaped views of the trainable part of `flat`, which may hold d or only the trainable values."""
        if self._viewed is None or self._viewed[0] is not flat:
            self._viewed = flat, self._cut(flat.detach())[: len(self.parameters)]
        return self._viewed[1]

    def _cut(self, flat: Tensor) -> list[Tensor]:
        values = self.parameters if flat.numel() == self.trainable else [*self.parameters, *self.buffers]
        parts = torch.split(flat, [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    def loss_gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Mean loss of a batch at the bound values, and its gradient."""
        loss = self.loss.mean(self._logits(x), y)
        gradients = self._gradients(loss)
        return loss.detach(), gradients

    def own_gradient(
        self, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """As `loss_gradient`, of another loss: `loss_of(module, x, y)` returns a tensor ()."""
        with self._dropping(), self._arithmetic:
            loss = loss_of(self.module, x, y)
        gradients = self._gradients(loss)
        self.bound_values.take_over(True, "the loss of the local algorithm")
        return loss.detach(), gradients

    def weighted_gradient(self, x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The losses ℓ_i (b,) of a batch, detached, and the gradient of Σ weights_i ℓ_i, one a parameter."""
        losses = self.loss.per_sample(self._logits(x), y)
        gradients = self._gradients(losses, weights)
        return losses.detach(), gradients

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses ℓ_i (b,) of a batch, without gradient."""
        with torch.no_grad():
            return self.loss.per_sample(self._logits(x), y)

    def _logits(self, x: Tensor) -> Tensor:
        # Autocast is left after every forward pass, which empties its cache: the weights change behind its back.
        with self._dropping(), self._arithmetic:
            logits = self.module(x)
        if not isinstance(logits, Tensor) or logits.is_complex():
            raise self._not_logits(logits)
        return logits.to(self.dtype)

    def _not_logits(self, returned: object) -> Exception:
        """The failure of a forward pass whose trials returned logits."""
        what = "complex numbers: return real ones" if is_complex(returned) else f"{type(returned).__name__}, no tensor"
        return TypeError(f"it returned {what}") if self.part is None else refuse_result(self.part, f"returned {what}")

    def _dropping(self) -> AbstractContextManager[object]:
        """Within: dropout that the forward pass calls for is served from `masks`, in training mode."""
        if not self.calls_dropout or not self.module.training:
            return nullcontext()
        if self.masks.from_torch and not self.masks.left_to_torch:
            raise UserError(
                "the model's gradients are wanted without dropout, which it calls for in functions while its forward "
                "pass is compiled or checkpointed: use nn.Dropout layers, or neither torch.compile nor checkpoints"
            )
        return self.dropout_calls

    def _gradients(self, of: Tensor, weights: Tensor | None = None) -> Sequence[Tensor | None]:
        """Gradients of a loss or of weighted losses; masks are those of the forward pass, and no others are given."""
        source = self.masks.source
        if self.has_dropout and not self.masks.from_torch and not isinstance(source, NoMasks):
            self.masks.source = ComputedAgain()
        try:
            if self.calls_dropout and not self.masks.from_torch:
                gradients = gradients_within(self.dropout_calls, of, self.parameters, weights)
            else:
                gradients = torch.autograd.grad(of, self.parameters, weights, allow_unused=True)
        finally:
            self.masks.source = source
        self.kept.take_replaced()
        self.bound_values.take_over(self.writes)
        return gradients

    @contextmanager
    def computing_in(self, precision: Precision) -> Iterator[None]:
        """Within: gradients are computed in this precision; values, losses and gradients keep their type.

        "bfloat16" runs the forward pass under torch.autocast, and so the backward pass through the same operations. Its
        range is that of float32: losses need no scaling (Kalamkar et al. 2019).
        """
        before = self._arithmetic
        if precision == "bfloat16":
            self._arithmetic = torch.autocast(self.device.type, dtype=torch.bfloat16)
        try:
            yield
        finally:
            self._arithmetic = before

    def sparse_pays(self, tokens: int) -> bool:
        """Whether batches of so many tokens touch few enough rows of the embedding tables for sparse gradients."""
        return sum(table.num_embeddings for table in self.embeddings) > SPARSE_ABOVE * tokens

    @contextmanager
    def sparse_embeddings(self, enabled: bool = True) -> Iterator[None]:
        """Within: gradients of the embedding tables are sparse tensors that hold only the rows touched."""
        before = [table.sparse for table in self.embeddings]
        for table in self.embeddings:
            table.sparse = enabled
        try:
            yield
        finally:
            for table, sparse in zip(self.embeddings, before, strict=True):
                table.sparse = sparse


def add_gradients(views: list[Tensor], gradients: Sequence[Tensor | None], alpha: float) -> None:
    """views += alpha · gradients in place, but for those without one; a sparse gradient (from an embedding) touches its
    rows only."""
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    dense = [pair for pair in pairs if not pair[1].is_sparse]
    if dense:
        torch._foreach_add_([view for view, _ in dense], [gradient for _, gradient in dense], alpha=alpha)
    for view, gradient in pairs if len(dense) < len(pairs) else ():
        if gradient.is_sparse:
            view.index_add_(0, gradient._indices()[0], gradient._values(), alpha=alpha)


def travelling_buffers(module: nn.Module) -> list[Tensor]:
    """Float buffers that the state dict holds, each once, but for masks of −∞, of which there is no average."""
    found: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set or not buffer.is_floating_point():
                continue
            if bool(buffer.isfinite().all()):
                found.setdefault(id(buffer), buffer)
    return list(found.values())


def _sparse_capable(module: nn.Module) -> list[nn.Embedding]:
    return [
        table
        for table in module.modules()
        if type(table) is nn.Embedding
        and table.weight.requires_grad
        and table.max_norm is None
        and not table.scale_grad_by_freq
    ]
