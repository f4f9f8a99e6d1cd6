"""What follows from the kind of task and its data: which data fit, and how many samples to look at together."""

from __future__ import annotations

import math

from fedmpi.common.errors import UserError
from fedmpi.data.schema import DataDescription

OUTPUT_BYTES = 1 << 26
"""Of the outputs at all positions that are formed at once: of a large vocabulary, a few hundred samples take gigabytes.
"""


def rows_at_once(description: DataDescription, most: int) -> int:
    """How many samples to pass through a model at once: `most`, and fewer where each has very many outputs."""
    if description.targets != "tokens":
        return most
    return max(1, min(most, OUTPUT_BYTES // (4 * math.prod(description.output_shape))))


def check_targets(kind: str, description: DataDescription, where: str) -> None:
    """Refuse data whose targets are not those of the task.

    Raises
    ------
    UserError
    """
    if description.targets != kind:
        raise UserError(
            f'task.kind = "{kind}" does not go with the data {where}, whose targets are {description.targets}: set '
            f'task.kind = "{description.targets}", or prepare them otherwise'
        )
