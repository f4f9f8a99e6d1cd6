"""The registry of partition laws."""

from __future__ import annotations

from data_prep.partitions.common import Law

PARTITIONS: dict[str, Law] = {}
