"""Layers and functions with parameters, for many clients side by side: the client is the first axis of everything.

A form is called as form(layer, weights, *inputs): `weights` maps the layer's parameters to `Weight`s (k, …), inputs and
outputs are (k, …) with what one client alone would see behind. Those that are `JOINED` take and give the samples of all
clients as one batch, (k · b, …), so that their results are no views. Autograd differentiates it. What has no form of
its own goes through `torch.vmap`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

from fedmpi.models.stacked.base import NotStackable
from fedmpi.models.stacked.client_weights import Weight

Form = Callable[..., Any]
LAYERS: dict[type[nn.Module], Form] = {}
"""Kind of layer -> form."""
JOINED: set[Form] = set()
"""Forms of one input and one result that take and give (k · b, …); what they give, no gradient of theirs needs."""
DROPPING: set[Form] = set()
"""Forms that take `drop`, which returns what it is given (k, b, …) with some values dropped, where the layer asks for
masks."""
ARRANGED: dict[type[nn.Module], dict[str, tuple[int, ...]]] = {}
"""Kind of layer -> the order in which the axes of its parameters lie in the stack, where it is not their own."""


def register_layer(kind: type[nn.Module]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function below it computes layers of this class for many clients at once."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def form(layer: nn.Module, weights: Mapping[str, Weight], *inputs: Any, **named: Any) -> Any:
            return function(layer, {name: weight.natural.value for name, weight in weights.items()}, *inputs, **named)

        LAYERS[kind] = form
        return function

    return decorate


def built_in(*kinds: type[nn.Module], joined: bool = False, dropping: bool = False) -> Callable[[Form], Form]:
    """A decorator: the form below it is that of these kinds of layers."""

    def decorate(form: Form) -> Form:
        LAYERS.update(dict.fromkeys(kinds, form))
        JOINED.update([form] * joined)
        DROPPING.update([form] * dropping)
        return form

    return decorate


class Product(torch.autograd.Function):
    """y = x Wᵀ + c of every client, (k, r, ·): the update is part of the backward pass where the weights allow it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, bias: Tensor | None, weight: Weight, bias_weight: Weight | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.value, ctx.weight, ctx.bias_weight = value.detach(), weight, bias_weight
        transposed = value.transpose(1, 2)
        return torch.bmm(x, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, transposed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        before = torch.bmm(gradient, ctx.value) if ctx.needs_input_grad[0] else None
        of_weight = ctx.weight.product(gradient.transpose(1, 2), x)
        of_bias = None if ctx.bias_weight is None else ctx.bias_weight.plain(gradient.sum(1))
        return before, of_weight, of_bias, None, None


def product(x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
    """x (k, …, inputs) through a dense layer."""
    value = weight.value
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    y: Tensor = Product.apply(rows, value, None if bias is None else bias.value, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], value.shape[1])


@built_in(nn.Linear)
def linear(layer: nn.Linear, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    return product(x, weights["weight"], weights.get("bias"))


def _scaled(x: Tensor, weights: Mapping[str, Weight], shape: tuple[int, ...]) -> Tensor:
    """x · weight + bias, with the parameters as `shape`."""
    weight, bias = (weights[name].value if name in weights else None for name in ("weight", "bias"))
    return _moved(x, weight, bias, shape)


def _moved(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if weight is not None and bias is not None:
        return torch.addcmul(bias.reshape(shape), x, weight.reshape(shape))
    if bias is not None:
        return x + bias.reshape(shape)
    return x if weight is None else x * weight.reshape(shape)


def _by_channel(x: Tensor) -> tuple[int, ...]:
    return x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)


LARGE = 1 << 14
"""Values of a client above which its norm is torch's own with its own scale: a call costs less than a pass over them.
"""


def stack_each(parts: Sequence[Tensor]) -> Tensor:
    """torch.stack of one result a client; images keep the order in which their values lie."""
    if len(parts) == 1:
        return parts[0].unsqueeze(0)
    if parts[0].dim() == 4 and parts[0].is_contiguous(memory_format=torch.channels_last):
        return torch.stack([part.permute(0, 2, 3, 1) for part in parts]).permute(0, 1, 4, 2, 3)
    return torch.stack(list(parts))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One client's samples after another's; of a single one, its own tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def separately(form: Form) -> Form:
    """A joined form as one that takes and gives (k, b, …)."""

    def separate(layer: nn.Module, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
        return torch.unflatten(form(layer, weights, x.flatten(0, 1)), 0, (len(x), -1))

    return separate


def _each(function: Callable[..., Tensor], weights: Mapping[str, Weight], parts: Sequence[Tensor]) -> list[Tensor]:
    """function(x, weight, bias) of one client after another; of a single one by views, whose gradients need no copy."""
    values = [weights[name].value if name in weights else None for name in ("weight", "bias")]
    if len(parts) == 1:
        return [function(parts[0], *(None if value is None else value.squeeze(0) for value in values))]
    weight, bias = ([None] * len(parts) if value is None else value.unbind(0) for value in values)
    return [function(one, w, b) for one, w, b in zip(parts, weight, bias, strict=True)]


@built_in(nn.GroupNorm, joined=True)
def group_norm(layer: nn.GroupNorm, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    def normed(one: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return functional.group_norm(one, layer.num_groups, weight, bias, layer.eps)

    if not weights:
        return normed(x)
    clients = len(next(iter(weights.values())).value)
    if x.numel() > LARGE * clients:
        return joined(_each(normed, weights, [x] if clients == 1 else x.chunk(clients)))
    y = torch.unflatten(normed(x), 0, (clients, -1))
    return _scaled(y, weights, _by_channel(y)).flatten(0, 1)


@built_in(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: nn.InstanceNorm2d, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    normed = functional.instance_norm(x.flatten(0, 1), eps=layer.eps)
    return _scaled(torch.unflatten(normed, 0, x.shape[:2]), weights, _by_channel(x))


def _of_last(layer: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> tuple[int, ...]:
    between = x.dim() - 1 - len(layer.normalized_shape)
    return x.shape[0], *[1] * between, *layer.normalized_shape


@built_in(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    if weights and x[0].numel() > LARGE:
        shape, parts = list(layer.normalized_shape), [x.squeeze(0)] if len(x) == 1 else x.unbind(0)
        return stack_each(_each(lambda one, w, b: functional.layer_norm(one, shape, w, b, layer.eps), weights, parts))
    normed = functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return _scaled(normed, weights, _of_last(layer, x))


@built_in(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, weights: Mapping[str, Weight], x: Tensor) -> Tensor:
    normed = functional.rms_norm(x, layer.normalized_shape, None, layer.eps)
    return _scaled(normed, weights, _of_last(layer, x))


@built_in(nn.Embedding)
def embedding(layer: nn.Embedding, weights: Mapping[str, Weight], ids: Tensor) -> Tensor:
    _need_rows(layer.max_norm, layer.scale_grad_by_freq)
    return _looked_up(ids, weights["weight"].value, layer.padding_idx)


@built_in(nn.EmbeddingBag)
def embedding_bag(layer: nn.EmbeddingBag, weights: Mapping[str, Weight], *inputs: Any, **named: Any) -> Any:
    _need_rows(layer.max_norm, layer.scale_grad_by_freq)
    return mapped_layer(layer, weights, *inputs, **named)


def _need_rows(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse what changes the vectors that are looked up, or weighs their gradients by how often they are."""
    if max_norm is not None or scale_grad_by_freq:
        raise NotStackable("Embedding with max_norm or scale_grad_by_freq")


def _looked_up(ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
    """Rows of every client's own table (k, words, …); `padding` gets no gradient."""
    client = torch.arange(len(ids), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
    found = table[client, ids.long()]
    return found if padding is None else torch.where((ids == padding).unsqueeze(-1), found.detach(), found)


def mapped_layer(layer: nn.Module, weights: Mapping[str, Weight], *inputs: Any, **named: Any) -> Any:
    """The form of a layer that has none: its own forward pass under `torch.vmap`."""
    values = {name: weight.natural.value for name, weight in weights.items()}

    def one(own: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(layer, own, args, kwargs)

    return mapped(one, values, *inputs, **named)


def mapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) of every client; all tensors are (k, …)."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned: list[Any] = []

    def one(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        own_args, own_kwargs = _pytree.tree_unflatten(filled, spec)
        returned[:] = _pytree.tree_flatten(function(*own_args, **own_kwargs))
        return tuple(leaf for leaf in returned[0] if isinstance(leaf, Tensor))

    tensors = iter(torch.vmap(one)(*(leaves[place] for place in places)))
    result = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in returned[0]]
    return _pytree.tree_unflatten(result, returned[1])


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """functional.linear of every client."""
    rows = torch.bmm(x.reshape(x.shape[0], -1, x.shape[-1]), weight.transpose(1, 2))
    y = rows if bias is None else rows + bias.unsqueeze(1)
    return y.view(*x.shape[:-1], weight.shape[1])


def look_up(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """functional.embedding of every client: under `torch.vmap` padding would get a gradient."""
    _need_rows(max_norm, scale_grad_by_freq)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[1]
    return _looked_up(input, weight, padding_idx)


def look_up_rows(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """torch.embedding of every client, where -1 is no padding."""
    _need_rows(None, scale_grad_by_freq)
    return _looked_up(indices, weight, None if padding_idx < 0 else padding_idx)


def bags(input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
    """functional.embedding_bag of every client."""
    given = inspect.signature(functional.embedding_bag).bind(input, weight, *rest, **named).arguments
    _need_rows(given.get("max_norm"), given.get("scale_grad_by_freq", False))
    return mapped(functional.embedding_bag, input, weight, *rest, **named)


def normed_groups(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """functional.group_norm and torch.group_norm of every client."""
    normed = functional.group_norm(input.flatten(0, 1), num_groups, eps=eps)
    return _moved(torch.unflatten(normed, 0, input.shape[:2]), weight, bias, _by_channel(input))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.linear: dense,
    functional.embedding: look_up,
    torch.embedding: look_up_rows,
    functional.embedding_bag: bags,
    functional.group_norm: normed_groups,
    torch.group_norm: normed_groups,
}
"""Functions of parameters that have a form: the same, with (k, …) everywhere."""

ELEMENT_BY_ELEMENT: dict[Any, Callable[..., Any]] = {
    operator.add: torch.add, torch.add: torch.add, "add": torch.add,
    operator.mul: torch.mul, torch.mul: torch.mul, "mul": torch.mul,
    operator.sub: torch.sub, torch.sub: torch.sub, "sub": torch.sub,
    operator.truediv: torch.div, torch.div: torch.div, "div": torch.div,
}  # fmt: skip
"""Functions that broadcast their operands."""
