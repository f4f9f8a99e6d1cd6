"""What comes back through a model: whether there is a gradient at all, and whether those of samples add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedmpi.common.arithmetic import full_precision
from fedmpi.common.calling import failure_of
from fedmpi.common.errors import UserError, raised
from fedmpi.common.generators import kept_generators
from fedmpi.models.dropout import NoMasks
from fedmpi.models.dropout_calls import gradients_within
from fedmpi.models.flat import FlatModel

SCALES = 2.0**-10, 2.0**10


def check_gradient(model: FlatModel, x: Tensor) -> None:
    """Refuse a model of whose outputs there is no gradient by its parameters, or that goes about gradients itself."""
    if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in model.parameters):
        raise UserError(
            "a parameter has a hook that waits for its .grad (register_post_accumulate_grad_hook), which no engine "
            "sets: change the gradient by register_hook"
        )
    outputs = model.module(x)
    if any(one.grad is not None for one in model.parameters):
        raise UserError(
            "the model's forward pass calls backward(), whose gradients would be lost: return outputs alone, and "
            "put what else is to be minimised into the objective of a local algorithm"
        )
    if not outputs.requires_grad:
        raise UserError(
            "the model's outputs have no gradient by its parameters (detach(), torch.no_grad(), a step by numpy?): "
            "nothing could be learned"
        )
    try:
        gradients_within(model.dropout_calls, outputs.sum(), model.parameters)
    except Exception as error:
        problem = f"its gradient fails on samples made up before the first round: {raised(error)}"
        if model.part is None:
            raise UserError(f"the model cannot be trained: {problem}") from error
        raise failure_of(model.part, error, problem) from error


def bends_gradients(model: FlatModel, x: Tensor) -> bool:
    """Whether what comes back through the model is other than a sum over samples, in proportion to their weights.

    Tried by weights that are some powers of two apart, which changes no rounding, and by halves of the samples, where
    anything but torch's own operations has a hand in it.
    """
    model.module.train()
    narrow = model.dtype == torch.float16  # such weights would leave its range
    if narrow or not _changes_gradients(model, x[: len(x) // 2]):
        return False

    def gradient(rows: slice, scale: float = 1.0) -> Tensor:
        model.restart()
        outputs = model.module(x[rows])
        towards = torch.linspace(-1, 1, len(x) * outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
        weights = scale * towards.view(len(x), *outputs.shape[1:])[rows]
        found = gradients_within(model.dropout_calls, outputs, model.parameters, weights)
        dense = [torch.zeros(p.numel()) if one is None else one for p, one in zip(model.parameters, found, strict=True)]
        return torch.cat([one.to_dense().reshape(-1).cpu().double() for one in dense]) / scale

    first, second = slice(len(x) // 2), slice(len(x) // 2, None)
    with kept_generators(), full_precision(), model.masks.given_by(NoMasks()), model.dropout_calls:
        half = gradient(first)
        scaled = [gradient(first, scale) for scale in SCALES]
        whole, other = gradient(slice(None)), gradient(second)
    model.restart()
    off = [float((one - half).norm() / half.norm()) for one in scaled]
    return max(off) > 1e-3 or float((half + other - whole).norm() / whole.norm()) > 0.05


class _Hooks(TorchFunctionMode):
    """Within: it is seen whether values get hooks."""

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.found |= getattr(func, "__name__", "") == "register_hook"
        return func(*args, **(kwargs or {}))


def _changes_gradients(model: FlatModel, x: Tensor) -> bool:
    """Whether hooks, or functions with a backward pass of their own, see gradients."""
    parts = list(model.module.modules())
    if any(one._backward_hooks for one in model.parameters):
        return True
    if any(part._backward_hooks or part._backward_pre_hooks for part in parts):
        return True
    model.restart()
    with kept_generators(), model.masks.given_by(NoMasks()), model.dropout_calls, _Hooks() as hooks:
        waiting = [model.module(x).grad_fn]
    model.restart()
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if not getattr(getattr(node, "_forward_cls", torch), "__module__", "torch.").startswith("torch."):
            return True
        new = {one for one, _ in getattr(node, "next_functions", ()) if one is not None} - met
        met |= new
        waiting += new
    return bool(hooks.found)
