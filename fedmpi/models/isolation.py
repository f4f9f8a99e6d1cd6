"""Detection of modules that keep nothing between forward passes, and fresh copies of all others.

A plain module is trained in place: its parameters become views of the vector of one client at a time. For any other
module, every client gets its own copy that has never run, or a newly built one if hooks may refer to the original
module. Everything that a forward pass counts, keeps, writes or replaces is discarded with that copy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from fedmpi.common.errors import UserError, raised
from fedmpi.models.layers import Dropout

KNOWN = {
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Bilinear,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell,
    nn.MultiheadAttention, nn.Upsample, nn.PixelShuffle, nn.ZeroPad1d, nn.ZeroPad2d, nn.ReflectionPad2d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardtanh,
    nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.PReLU, nn.Softmax, nn.LogSoftmax,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
}  # fmt: skip
"""Layers that keep nothing except their buffers; layers that draw from torch's generator are excluded."""
OWN = "fedmpi.models."
PLAIN_VALUES = int, float, complex, str, bytes, type(None), tuple
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def is_plain(module: nn.Module) -> bool:
    """Check whether every part of a module is a known layer or one of fedmpi's own, without changes to its class."""
    return not has_hooks(module) and all(map(_plain_part, module.modules()))


def _plain_part(part: nn.Module) -> bool:
    known = type(part) in KNOWN or type(part).__module__.startswith(OWN)
    # values that torch's own layers keep besides their options begin with an underscore
    kept = (value for name, value in vars(part).items() if name[0] != "_" and type(part) in KNOWN)
    draws = isinstance(rate := getattr(part, "dropout", 0), int | float) and rate > 0
    writes = getattr(part, "max_norm", None) is not None
    return known and not draws and not writes and all(isinstance(value, PLAIN_VALUES) for value in kept)


def has_hooks(module: nn.Module) -> bool:
    """Check whether hooks, which may refer to their original module, observe its values or gradients."""
    of_parts = any(getattr(part, name) for part in module.modules() for name in HOOKS)
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    return of_parts or any(getattr(one, name, None) for one in module.parameters() for name in names)


class Tracer(fx.Tracer):
    """Tracer of forward passes of the samples alone; `leaves` are further classes of layers not to look into."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: Container[type] = ()):
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Dropout) or type(m) in self.leaves or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        return root_fn, [self.root, self.create_proxy("placeholder", "samples", (), {})]

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace through a layer that the forward pass itself creates (`nn.Softmax(dim=1)(x)`)."""
        known = any(m is part for part in self.root.modules())
        return super().call_module(m, forward, args, kwargs) if known else forward(*args, **kwargs)


def why_untraceable(module: nn.Module) -> str | None:
    """Return why torch.fx cannot trace a forward pass, as if it depends on the samples' values; None if it can."""
    try:
        Tracer().trace(copy.deepcopy(module))
    except Exception as error:
        return raised(error)
    return None


def copy_of(module: nn.Module, *shared: object) -> nn.Module:
    """Return a copy of a module, which refers to the same `shared` objects."""
    try:
        return copy.deepcopy(module, {id(one): one for one in shared})
    except Exception as error:
        raise UserError(
            f"the model {type(module).__name__} cannot be copied, as it is for every client. Give a function that "
            "builds it, or take out what has no copy (torch.nn.utils.weight_norm, open files, tensors with a graph): "
            f"{raised(error)}"
        ) from error


def maker_of(module: nn.Module, rebuild: Callable[[], nn.Module] | None, *shared: object) -> Callable[[], nn.Module]:
    """Return a function that makes fresh modules: copies of one that is never run, with the same `shared` objects.

    Where hooks may refer to that module, or it has no copy, they are built again if there is a way to.
    """
    copied = partial(copy_of, module, *shared)
    if rebuild is None or is_plain(module):
        return copied
    try:
        return rebuild if has_hooks(module) or copied() is None else copied
    except UserError:
        return rebuild


def seed_held_generators(module: nn.Module, seed: int) -> None:
    """Seed the generators among the attributes of a module and its parts."""
    for part in module.modules():
        for held in vars(part).values():
            if isinstance(held, np.random.Generator):
                held.bit_generator.state = type(held.bit_generator)(seed).state
            elif isinstance(held, torch.Generator):
                held.manual_seed(seed)
            elif isinstance(held, random.Random | np.random.RandomState):
                held.seed(seed % 2**32)


def travelling_buffers(module: nn.Module) -> list[Tensor]:
    """Return the float buffers of the state dict, each once, except masks of −∞, which cannot be averaged."""
    found = (buffer for *_, buffer in _persistent(module) if buffer.is_floating_point())
    return [buffer for buffer in found if bool(buffer.isfinite().all())]


def integer_buffers(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Return the places of the integer buffers of the state dict, each once."""
    found = _persistent(module)
    return [(held, name) for held, name, one in found if not (one.is_floating_point() or one.is_complex())]


def _persistent(module: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Yield the place of each buffer of the state dict, and the buffer."""
    seen = set()
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield owner._buffers, name, buffer


def check_memory(module: nn.Module) -> None:
    """Reject a module in which a trained parameter shares its memory with another one, or with a buffer."""
    first: dict[int, tuple[str, bool]] = {}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.layout is not torch.strided or not value.numel():
            continue
        other, trained = first.setdefault(value.data_ptr(), (name, value.requires_grad))
        if other != name and (trained or value.requires_grad):
            raise UserError(
                f"the model's {other} and {name} share memory, but only one of them would follow the training. Clone "
                "one (….detach().clone()), or let both be one parameter (self.a = self.b)"
            )
