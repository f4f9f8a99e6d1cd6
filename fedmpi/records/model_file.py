"""The final model as a safetensors file: every name of the module's state dict, tied values under each of their names.

Loaded into a freshly built module with `load_state_dict`, tied parameters are tied again, since the module ties them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.models import check_values


def model_file(module: nn.Module) -> bytes:
    """The bytes of model.safetensors."""
    check_values(module)
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
            kind = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise UserError(
                f"the model cannot be saved: {name} of its state dict is {kind}, not a dense tensor; leave it out of "
                "the state dict, or make it one"
            )
        dense = value.detach().cpu().contiguous()
        tensors[name] = dense.clone() if any(_overlap(dense, other) for other in tensors.values()) else dense
    try:
        return save(tensors)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the model cannot be saved ({error}): change what its state_dict holds") from error


def load_model(module: nn.Module, path: Path) -> None:
    """Give a freshly built module the values of model.safetensors."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        tensors = load_file(path)
        own = module.state_dict()
        for name, tensor in tensors.items():
            if name in own and tensor.dtype != own[name].dtype:
                raise ValueError(f"{name} is {tensor.dtype} there and {own[name].dtype} in the model")
        module.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold this model ({error})") from None


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
