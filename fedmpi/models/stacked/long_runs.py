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
    their own order. Where padding interrupts the runs nothing changes.
    """
    ordered = list(layers)
    for place in reversed(range(len(ordered))):
        layer = ordered[place]
        source = _source(ordered, place)
        if source is None or not isinstance(layer, Convolution | PooledConvolution):
            continue
        patches = layer.geometry if isinstance(layer, Convolution) else layer.pairs
        width, parts = patches.image[2], patches.stride[1] * patches.writes
        if any(patches.padding) or width % parts or (isinstance(layer, PooledConvolution) and not layer.doubled):
            continue
        ordered[place] = _read(layer, parts)
        for before in range(source, place):
            ordered[before] = _written(ordered[before], ColumnOrder(width, parts))
    return tuple(ordered)


def _source(layers: Sequence[Layer], place: int) -> int | None:
    """Whose outputs a layer's columns are: the place of a layer that can write them in any order, if it is one."""
    while place > 0:
        place -= 1
        layer = layers[place]
        if isinstance(layer, ImageColumns | Convolution) or (isinstance(layer, PooledConvolution) and layer.doubled):
            return place
        if not isinstance(layer, ReLU | Squash | StackedDropout):
            break
    return None


def _read(layer: Convolution | PooledConvolution, parts: int) -> Layer:
    if isinstance(layer, PooledConvolution):
        return replace(layer, reads=parts)
    return replace(layer, geometry=replace(layer.geometry, reads=parts))


def _written(layer: Layer, order: ColumnOrder) -> Layer:
    if isinstance(layer, ImageColumns | StackedDropout):
        return replace(layer, order=order)
    if isinstance(layer, PooledConvolution):
        return replace(layer, writes=order.parts)
    if isinstance(layer, Convolution):
        return replace(layer, geometry=replace(layer.geometry, writes=order.parts))
    return layer
