"""The switch of the batched engine: the only module that imports `local.batched`, which a run can do without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmpi.data.schema import DataDescription
from fedmpi.local.traits import forward_traits
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import LOSS_ALONE

if TYPE_CHECKING:
    from fedmpi.local.batched.engine import BatchedEngine
    from fedmpi.local.batched.probes import BatchedProbe


def why_not_batched(model: FlatModel, description: DataDescription) -> str | None:
    """Return the reason why the batched engine cannot train a model with its loss, None if it can."""
    traits = forward_traits(model, description)
    if not model.plain and (traits.keeps or traits.couples or model.hooked):
        return "its forward pass keeps something, draws random numbers, joins the samples of a batch, or has hooks"
    try:
        from fedmpi.local.batched.base import NotStackable
        from fedmpi.local.batched.translation import translate
    except ImportError:
        return "fedmpi.local.batched is missing"
    try:
        translate(model.module, description, model.stacked_forms)
    except NotStackable as reason:
        return str(reason)
    return LOSS_ALONE if traits.loss_couples else None


def batched_engine(*args: Any, **kwargs: Any) -> BatchedEngine:
    """Build the batched engine; see `BatchedEngine`."""
    from fedmpi.local.batched.engine import BatchedEngine

    return BatchedEngine(*args, **kwargs)


def batched_probe(*args: Any) -> BatchedProbe:
    """Build the probe of batched clients; see `BatchedProbe`."""
    from fedmpi.local.batched.probes import BatchedProbe

    return BatchedProbe(*args)
