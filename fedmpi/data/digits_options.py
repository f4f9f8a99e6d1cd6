"""Options of the embedded digits: beside `data.source = "digits"`, or within its name, "digits:clients=50"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedmpi.common.registry import DIGITS, register


@register("data source", name=DIGITS)
@dataclass(frozen=True, kw_only=True)
class DigitsOptions:
    """The 1,797 handwritten digits that come with scikit-learn, given to clients; no file is needed.

    `data.source` may also name a folder that `python -m data_prep` wrote. Options may be written in the name as well,
    "digits:clients=50,partition=iid".

    Parameters
    ----------
    clients : int
        N, at most the 1,442 training images.
    partition : {"dirichlet", "iid"}
        Dirichlet(alpha) shares of the clients for every class, or equal random parts.
    alpha : float
        Concentration of the Dirichlet distribution; the default is mildly heterogeneous.
    seed : int
        Seed of the partition, independent of a run's seed.
    """

    clients: Annotated[int, Field(ge=1)] = 20
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    alpha: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
