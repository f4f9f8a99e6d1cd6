"""Models by name, or by "package.module:function" of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedmpi.common.errors import UserError, raised
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


def build(name: Any, options: Mapping[str, Any], description: DataDescription, seed: int) -> nn.Module:
    """A freshly initialised model, the same on every rank.

    Torch's global CPU generator is seeded from the stream MODEL_INIT while the model is built and put back afterwards.

    Parameters
    ----------
    name : str, function or nn.Module
        A built-in name; "package.module:function" or the function itself, called as
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
    part = resolve("model", name)
    checked = part.checked(options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Streams(seed).seed64(Purpose.MODEL_INIT))
        try:
            model = part.object(description, **checked)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit() in a model must not end the run as if it were done
            raise UserError(f"model.name = {part.name!r}: building it failed with {raised(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model.name = {part.name!r} returned {type(model).__name__}: the function must return a nn.Module"
        )
    return model
