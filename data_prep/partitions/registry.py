"""The registry of partition laws, in the order in which the command line lists them."""

from __future__ import annotations

from data_prep.partitions.astraea_laws import ASTRAEA
from data_prep.partitions.attribute_law import ATTRIBUTE
from data_prep.partitions.class_draws import PATHOLOGICAL
from data_prep.partitions.common import Law
from data_prep.partitions.label_laws import DIRICHLET, IID, LABEL_SORTED, SHARDS
from data_prep.partitions.mix_laws import INNER_DIRICHLET, PACHINKO
from data_prep.partitions.size_laws import LOGNORMAL, SIZES
from data_prep.partitions.user_laws import USER, USER_GROUPS

PARTITIONS: dict[str, Law] = {
    "iid": IID,
    "dirichlet": DIRICHLET,
    "inner-dirichlet": INNER_DIRICHLET,
    "shards": SHARDS,
    "pathological": PATHOLOGICAL,
    "label-sorted": LABEL_SORTED,
    "pachinko": PACHINKO,
    "lognormal": LOGNORMAL,
    "sizes": SIZES,
    "attribute": ATTRIBUTE,
    "user": USER,
    "user-groups": USER_GROUPS,
    "astraea": ASTRAEA,
}
