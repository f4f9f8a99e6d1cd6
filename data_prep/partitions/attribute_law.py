"""Partition by a continuous attribute of the rows: a column of numbers, a row's mean brightness, a text's length."""

from __future__ import annotations

import numpy as np

from data_prep.partitions.common import Draw, Law, LawOption, Request
from data_prep.partitions.label_laws import enough
from fedmpi.common.errors import UserError
from fedmpi.data.assignment import even_sizes, group_by_owner


def draw_by_attribute(request: Request) -> Draw:
    """Rows sorted by an attribute blurred with noise, cut into N clients whose sizes differ by at most one.

    The order is that of s z + (1 - s) e, z the standardised attribute, e ~ N(0, 1) independent for each row, s the
    `strictness`: 1 sorts by the attribute itself (rows of equal value in random order), 0 is the partition iid. The law
    of the ContinuousPartitioner of Flower Datasets. Which clients come first in the order is random.
    """
    assert request.attribute is not None  # the registry asks for it
    clients, strictness = enough(request), request.number("strictness")
    if strictness > 1:
        raise UserError(f"--strictness {strictness:g} is impossible: give a number from 0 to 1")
    name = str(request.options["attribute"])
    values = request.attribute(name)
    if (wrong := np.flatnonzero(~np.isfinite(values))).size:
        raise UserError(f"--attribute {name}: row {wrong[0]} has no finite value: choose another or mend the data")
    spread = values.std()
    if not spread > 0:
        raise UserError(f"--attribute {name} is {values[0]:g} for every row: choose another")
    noise = request.generator.standard_normal(len(values))
    score = strictness * (values - values.mean()) / spread + (1 - strictness) * noise
    order = np.lexsort((noise, score))
    sizes = even_sizes(len(values), clients)
    place = request.generator.permutation(clients)  # the clients in the order of the attribute
    owner = np.empty(len(values), np.int64)
    owner[order] = np.repeat(place, sizes[place])
    return Draw(*group_by_owner(owner, clients, request.generator))


ATTRIBUTE = Law(
    draw_by_attribute,
    "rows sorted by a continuous attribute blurred with noise and cut into N equal clients",
    (
        LawOption("attribute", str, None, "mean or std of a sample's features, length of a text, or a column's name"),
        LawOption("strictness", float, 1.0, "1: sorted by the attribute alone; 0: at random", low=0.0),
    ),
    needs="attributes",
)
