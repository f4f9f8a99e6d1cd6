"""Models whose samples have several arrays, or whose outputs hold more than logits.

Such a module gets a class of its own whose calls take packed samples (`data.inputs`) and return the logits. Everything
else is that of the user's class, so names of parameters, copies and checkpoints are those of the module as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedmpi.data.schema import Input

WRITTEN = "_fedmpi_written"
"""Attribute of an adapted class: the user's class."""
TYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


def adapted(module: nn.Module, inputs: tuple[Input, ...]) -> nn.Module:
    """Return the module itself, with calls that take packed samples (b, d) if there are `inputs`, and return logits."""
    written: Any = type(module)

    def call(self: nn.Module, x: Tensor) -> Any:
        arrays = unpacked(x, inputs)
        given = [arrays.pop(name) for name in sorted(filter(str.isdigit, arrays), key=int)] if inputs else [x]
        return logits_of(written.__call__(self, *given, **arrays))

    same = {name: getattr(written, name) for name in ("__module__", "__qualname__", "__doc__")}
    module.__class__ = type(written.__name__, (written,), {**same, "__call__": call, WRITTEN: written})
    return module


def as_written(module: nn.Module) -> nn.Module:
    """Return the module itself, with the class that it was written with."""
    module.__class__ = getattr(type(module), WRITTEN, type(module))
    return module


def unpacked(x: Tensor, inputs: tuple[Input, ...]) -> dict[str, Tensor]:
    """Return the arrays (b, …) of packed samples (b, d), by name."""
    if not inputs:
        return {}
    parts = zip(inputs, torch.split(x, [one.values for one in inputs], dim=1), strict=True)
    return {
        one.name: (part.contiguous().view(torch.float32) if one.dtype == "float32" else part.to(TYPES[one.dtype])).view(
            len(x), *one.shape
        )
        for one, part in parts
    }


def logits_of(outputs: Any) -> Any:
    """Return the logits of a model's outputs: of an object or a dict that has them, else the outputs."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
