"""Models by name, or custom models by "package.module:function"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedmpi.common.calling import calling, refuse_result, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.models.inputs import logits_of
from fedmpi.models.isolation import copy_of
from fedmpi.models.lora import with_lora

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


class Copies(nn.ModuleList):
    """Copies of a model with different initial values (`model.copies`); each client trains and uses one of them.

    `active` is the copy that a pass uses; without one, the outputs are the means of the outputs of all copies.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__(modules)
        self.active: int | None = None

    def forward(self, *samples: Any, **named: Any) -> Tensor:
        if self.active is not None:
            return logits_of(self[self.active](*samples, **named))  # type: ignore[no-any-return]
        return torch.stack([logits_of(module(*samples, **named)) for module in self]).mean(0)


def build(name: Any, options: Mapping[str, Any], description: DataDescription, seed: int) -> nn.Module:
    """Return a freshly initialized model, identical on every rank.

    Torch's global CPU generator is seeded from the stream MODEL_INIT while the model is built and restored afterwards.
    """
    copies = options.get("copies", 1)
    if copies > 1:
        return Copies([_built(name, options, description, seed, copy) for copy in range(copies)])
    return _built(name, options, description, seed)


def _built(name: Any, options: Mapping[str, Any], description: DataDescription, seed: int, copy: int = 0) -> nn.Module:
    lora = options.get("lora")
    checked = check_model_options(name, options)
    if isinstance(name, nn.Module):
        if options.get("copies", 1) > 1:
            raise UserError("model.copies needs models that start differently. Give a function, not a module")
        return _adapted(copy_of(name), lora, seed)
    part = resolve("model", name)
    if not part.foreign and description.inputs:
        arrays = ", ".join(one.name for one in description.inputs)
        raise UserError(
            f'model.name = "{name}" takes one array per sample, but the data have several ({arrays}). Write a model '
            "with these arguments"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Streams(seed).seed64(Purpose.MODEL_INIT, 0, copy))
        takes(part, partial(part.object, **checked), "description")
        with calling(part):
            model = part.object(description, **checked)
    if not isinstance(model, nn.Module):
        raise refuse_result(part, f"it returned {type(model).__name__}. Return a torch.nn.Module")
    return _adapted(model, lora, seed)


def check_model_options(name: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model, converted to their types; reject invalid ones that need no data to check."""
    own = {key: value for key, value in options.items() if key not in ("lora", "copies")}
    if not isinstance(name, nn.Module):
        return resolve("model", name).checked(own)
    if own:
        raise UserError(f"model.{next(iter(own))} has no effect on a model that is given as a module. Remove it")
    return {}


def _adapted(model: nn.Module, lora: Mapping[str, Any] | None, seed: int) -> nn.Module:
    """Return the model, with LoRA as small matrices from the stream (MODEL_INIT, 1), which alone are trained."""
    check_values(model)
    if lora is None:
        return model
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Streams(seed).seed64(Purpose.MODEL_INIT, 1))
        return with_lora(model, lora)


def check_values(module: nn.Module) -> None:
    """Reject a module whose tensors have no values yet."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            raise UserError(
                f"the model's {name} has no values yet (nn.Lazy…, or torch's meta device). Build the model on the CPU "
                "with sizes for each layer, or pass one batch through it where it is built"
            )
