"""Models by name, or by "package.module:function" of the user's own."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.common.registry import object_name
from fedmpi.common.streams import Purpose, Streams

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

Builder = Callable[..., nn.Module]

REGISTRY = {
    "mlp": "fedmpi.models.mlp:mlp",
    "cnn": "fedmpi.models.astraea_cnn:astraea_cnn",
    "cifar-cnn": "fedmpi.models.cifar_cnn:cifar_cnn",
    "image-cnn": "fedmpi.models.image_cnn:image_cnn",
    "resnet18": "fedmpi.models.resnet:resnet18",
    "text-cnn": "fedmpi.models.text_cnn:text_cnn",
    "fedsampling-text-cnn": "fedmpi.models.text_cnn:fedsampling_text_cnn",
    "transformer": "fedmpi.models.transformer:transformer",
    "lstm": "fedmpi.models.bilstm:lstm",
    "bilstm": "fedmpi.models.bilstm:bilstm",
}
"""Where the built-in models live; imported when asked for."""


def build(name: Any, options: Mapping[str, Any], description: DataDescription, seed: int) -> nn.Module:
    """A freshly initialised model, the same on every rank.

    Torch's global CPU generator is seeded from the stream MODEL_INIT while the model is built and put back afterwards.

    Parameters
    ----------
    name : str, function or nn.Module
        A key of `REGISTRY`; "package.module:function" or the function itself, called as
        function(description, **options); or a module, which is copied and keeps its values.
    options : mapping
        The model's own options.
    description : DataDescription
        The data it is for.
    seed : int
        The run's seed.

    Returns
    -------
    nn.Module
        On the CPU, mapping (b, …) samples to (b, C) logits.

    Raises
    ------
    UserError
        Unknown name, failing import, an option the model does not have, or anything its function raises.
    """
    if isinstance(name, nn.Module):
        if options:
            raise UserError(f"model.{next(iter(options))} means nothing here: the model is given as a module")
        return copy.deepcopy(name)
    builder = builder_of(name)
    name = name if isinstance(name, str) else object_name(name)
    _check_options(name, builder, options, description)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Streams(seed).seed64(Purpose.MODEL_INIT))
        try:
            model = builder(description, **options)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"model.name = {name!r}: building it failed with {type(error).__name__}: {error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name = {name!r} returned {type(model).__name__}: the function must return a nn.Module")
    return model


def builder_of(name: Any) -> Builder:
    """The function behind a name, or given itself; raises UserError where there is none."""
    if not isinstance(name, str):
        if not callable(name):
            raise UserError(f"model.name = {name!r} is no model: give a name, a function or a nn.Module")
        given: Builder = name
        return given
    if name in REGISTRY:
        return _load(name, REGISTRY[name])
    if ":" in name:
        return _load(name, name)
    nearest = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise UserError(
        f"model.name = {name!r} is unknown: {hint}choose one of {', '.join(REGISTRY)}, "
        'or your own "package.module:function"'
    )


def _load(name: str, path: str) -> Builder:
    """The function at "package.module:function"; the working directory is searched last."""
    module_name, _, function_name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"model.name = {name!r}: importing the module {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        raise UserError(f"model.name = {name!r}: the module {module_name!r} has no function {function_name!r}")
    found: Builder = builder
    return found


def _check_options(name: str, builder: Builder, options: Mapping[str, Any], description: DataDescription) -> None:
    try:
        signature = inspect.signature(builder)
    except ValueError:  # some callables written in C have none: let the call itself complain
        return
    try:
        signature.bind(description, **options)
    except TypeError as error:
        accepted = [p.name for p in list(signature.parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
        listed = f"its options are {', '.join(accepted)}" if accepted else "it has no options"
        raise UserError(f"model.name = {name!r}: {error}; {listed}") from error
