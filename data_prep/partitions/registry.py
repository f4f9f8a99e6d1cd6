"""The registry of partition laws, in the order in which the command line lists them."""

from __future__ import annotations

from data_prep.partitions.astraea_laws import ASTRAEA
from data_prep.partitions.common import Law
from data_prep.partitions.label_laws import DIRICHLET, IID, LABEL_SORTED, SHARDS, USER
from data_prep.partitions.size_laws import LOGNORMAL, SIZES

PARTITIONS: dict[str, Law] = {
    "iid": IID,
    "dirichlet": DIRICHLET,
    "shards": SHARDS,
    "label-sorted": LABEL_SORTED,
    "lognormal": LOGNORMAL,
    "sizes": SIZES,
    "user": USER,
    "astraea": ASTRAEA,
}
