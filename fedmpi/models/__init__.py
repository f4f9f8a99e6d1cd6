"""Models by name, or custom models by "package.module:function"."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedmpi.common.calling import naming, refuse_result, takes
from fedmpi.common.errors import UserError, raised
from fedmpi.common.registry import Component, resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.models.lora import with_lora

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


def build(name: Any, options: Mapping[str, Any], description: DataDescription, seed: int) -> nn.Module:
    """Return a freshly initialized model, identical on every rank.

    Torch's global CPU generator is seeded from the stream MODEL_INIT while the model is built and restored afterwards.
    """
    lora = options.get("lora")
    options = {key: value for key, value in options.items() if key != "lora"}
    checked = check_model_options(name, options)
    if isinstance(name, nn.Module):
        return _adapted(_copied(name), lora, seed)
    part = resolve("model", name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Streams(seed).seed64(Purpose.MODEL_INIT))
        takes(part, partial(part.object, **checked), "description")
        with naming(part) if part.foreign else _refused(part):
            model = part.object(description, **checked)
    if not isinstance(model, nn.Module):
        raise refuse_result(part, f"it returned {type(model).__name__}: return a torch.nn.Module")
    return _adapted(model, lora, seed)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a custom network, which is not changed."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise UserError(
            f"the {type(module).__name__} given as the model cannot be copied. Give a function that builds it instead, "
            f"or take out what has no copy (torch.nn.utils.weight_norm, open files): {raised(error)}"
        ) from error


@contextmanager
def _refused(part: Component) -> Iterator[None]:
    """Attribute errors inside the construction of a built-in model to its options."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.name = {part.name!r}: building it failed with {raised(error)}") from error


def check_model_options(name: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model, converted to their types; reject invalid ones that need no data to check."""
    own = {key: value for key, value in options.items() if key != "lora"}
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
        if is_lazy(tensor):
            raise UserError(
                f"the model's {name} has no shape yet (nn.Lazy…). Give the layer its sizes, or pass one batch through "
                "the model where it is built"
            )
        if tensor.is_meta:
            raise UserError(
                f"the model's {name} has no values: it is on torch's meta device. Build the model on the CPU, or call "
                "its to_empty(device='cpu') and initialize it"
            )
