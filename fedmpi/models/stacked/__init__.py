"""Batched forms of models: many clients' copies of the weights, trained in one launch."""

from fedmpi.models.stacked.forms import register_layer

__all__ = ["register_layer"]
