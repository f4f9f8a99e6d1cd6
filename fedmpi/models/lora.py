"""LoRA: freezes a model's values and trains small matrices added to its Linear layers (Hu et al. 2022, Eq 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.models.isolation import travelling_buffers


class LoraLinear(nn.Linear):
    """W x + b + (α / r) B A x: weight and bias are frozen, A and B are trained."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        like = layer.weight
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=like.dtype, device=like.device))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=like.dtype, device=like.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        small = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return functional.linear(x, self.weight, self.bias) + self.scale * small


def with_lora(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Return the module with small matrices added to its Linear layers; only these are trained from now on."""
    rank, alpha, targets = int(options["rank"]), float(options["alpha"]), tuple(options["targets"])
    layers = {name: part for name, part in module.named_modules(remove_duplicate=False) if type(part) is nn.Linear}
    if not layers:
        raise UserError("model.lora goes beside Linear layers, but the model has none. Leave it out")
    for target in targets:
        if not any(_named(name, (target,)) for name in layers):
            raise UserError(
                f"model.lora.targets: no Linear layer is named {target!r}. Choose among {', '.join(layers)}"
            )
    if travelling_buffers(module):
        raise UserError(
            "model.lora freezes the model except for small matrices, but this model has floating-point buffers "
            "that may change in training, such as batch norm's statistics. Choose another model, or register buffers "
            "that are constant with persistent=False"
        )
    module.requires_grad_(False)
    made: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        if targets and not _named(name, targets):
            continue
        if id(layer) not in made:
            made[id(layer)] = LoraLinear(layer, rank, alpha)
        if not name:
            return made[id(layer)]
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, made[id(layer)])
    _forwarded(module)
    return module


def _forwarded(module: nn.Module) -> None:
    """Make torch's encoder layers call their Linear layers; in evaluation they would bypass `forward`."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0  # only their fast path reads it
        elif isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # only the fast path reads it


def _named(name: str, targets: Sequence[str]) -> bool:
    """Check whether one of the targets is the layer's name, its last part, or a pattern of either."""
    return any(fnmatchcase(each, target) for target in targets for each in (name, name.rpartition(".")[2]))
