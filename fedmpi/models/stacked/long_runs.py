"""Convolutions that copy long runs of memory: whose input's columns lie as `column_order` says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedmpi.models.stacked.base import Layer
from fedmpi.models.stacked.column_order import ColumnOrder
from fedmpi.models.stacked.dense import ReLU, Squash, StackedDropout
from fedmpi.models.stacked.image import Convolution, ImageColumns
from fedmpi.models.stacked.pooled import PooledConvolution


def with_long_runs(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The layers with columns in the order in which the convolutions behind them copy the longest runs.

    What lies between two convolutions takes value by value, whatever their order; any other layer finds the columns in
    their own order. Zeros around the samples become columns with them; around what other layers give they interrupt
    the runs, and nothing changes.
    """
    ordered = list(layers)
    for place in reversed(range(len(ordered))):
        layer, source = ordered[place], _source(ordered, place)
        if source is None or not _orders(layer):
            continue
        assert isinstance(layer, Convolution | PooledConvolution)
        images = ordered[source]
        if isinstance(images, ImageColumns):
            images = ordered[source] = replace(images, padding=layer.geometry.padding)
            layer = ordered[place] = replace(
                layer, geometry=replace(layer.geometry, image=images.padded, padding=(0, 0))
            )
        patches = layer.patches
        width, parts = patches.image[2], patches.stride[1] * patches.writes
        if any(patches.padding) or width % parts:
            continue
        ordered[place] = replace(layer, geometry=replace(layer.geometry, reads=parts))
        for before in range(source, place):
            ordered[before] = _written(ordered[before], ColumnOrder(width, parts))
    return tuple(ordered)


def _orders(layer: Layer) -> bool:
    """Whether a layer takes and gives columns in any order."""
    return isinstance(layer, Convolution) or (isinstance(layer, PooledConvolution) and layer.writes_filters)


def _source(layers: Sequence[Layer], place: int) -> int | None:
    """Whose outputs a layer's columns are: the place of a layer that can write them in any order, if it is one."""
    while place > 0:
        place -= 1
        if isinstance(layers[place], ImageColumns) or _orders(layers[place]):
            return place
        if not isinstance(layers[place], ReLU | Squash | StackedDropout):
            break
    return None


def _written(layer: Layer, order: ColumnOrder) -> Layer:
    if isinstance(layer, StackedDropout):
        return replace(layer, order=order)
    if isinstance(layer, ImageColumns):
        return replace(layer, parts=order.parts)
    if isinstance(layer, Convolution | PooledConvolution):
        return replace(layer, geometry=replace(layer.geometry, writes=order.parts))
    return layer
