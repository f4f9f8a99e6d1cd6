"""All ranks run the same: configuration, data, versions and the user's own sources are compared before anything else.

Each rank lists what it runs as facts, key and value. The digests of the lists are exchanged; only where they differ
do the lists travel, and the first facts that differ are named.
"""

from __future__ import annotations

import hashlib
import json
import socket
from functools import cache
from pathlib import Path

import numpy as np
from torch import nn

import fedmpi
from fedmpi.cluster import Cluster
from fedmpi.common.errors import UserError
from fedmpi.common.types import Bytes
from fedmpi.config import Config
from fedmpi.config.choices import data_options
from fedmpi.config.writing import flat_table
from fedmpi.data.opening import open_store
from fedmpi.data.schema import Manifest
from fedmpi.data.shards import ShardStore
from fedmpi.records.checkpoint import model_file
from fedmpi.records.provenance import digests, foreign_choices, part_sources, plugin_files, versions

Facts = dict[str, str]
NAMED = 3
"""Facts named in the refusal."""


def open_and_compare(cluster: Cluster, config: Config) -> ShardStore:
    """Open the data, and refuse ranks that do not run the same; collective, and before any other exchange."""
    store, refusal = None, ""
    try:
        store = open_store(config.data.shards, data_options(config))
    except UserError as error:
        refusal = str(error)
    compare_ranks(cluster, facts_of_run(config, store.manifest if store else None, refusal))
    if store is None:
        raise UserError(refusal)
    return store


def facts_of_run(config: Config, manifest: Manifest | None, refusal: str = "") -> Facts:
    """What this rank is about to run."""
    facts = {key: repr(value) for key, value in flat_table(config).items()}
    facts |= {f"{name} (version)": found for name, found in versions("").items() if name != "mpi"}
    facts["fedmpi's own sources (sha256)"] = _sources(Path(fedmpi.__file__).parent)
    choices = [choice for _, choice in foreign_choices(config)]
    facts |= {f"{path} (sha256)": digest for path, digest in plugin_files(*choices).items()}
    if any(not isinstance(choice, str) for choice in choices):
        facts |= {f"{name} (sha256)": digest for name, digest in digests(part_sources(config)).items()}
    if isinstance(config.model.name, nn.Module):
        facts["the values of the model given (sha256)"] = hashlib.sha256(model_file(config.model.name)).hexdigest()
    facts["the data"] = refusal or "readable"
    return facts | (manifest.identity() if manifest else {})


def compare_ranks(cluster: Cluster, facts: Facts) -> None:
    """Compare the ranks' facts; collective."""
    text = json.dumps(facts).encode()
    digests = cluster.gather(np.frombuffer(hashlib.sha256(text).digest(), np.uint8))
    (table,) = cluster.broadcast([np.stack(digests)] if digests is not None else None)
    speakers = np.unique(table, axis=0, return_index=True)[1]  # the first rank with each of the lists
    if len(speakers) == 1:
        return
    mine = json.dumps([socket.gethostname(), facts]).encode() if cluster.rank in speakers else b""
    lists = cluster.gather(np.frombuffer(mine, np.uint8))
    message = None
    if lists is not None:
        message = [np.frombuffer(_difference(sorted(speakers.tolist()), lists).encode(), np.uint8)]
    raise UserError(cluster.broadcast(message)[0].tobytes().decode())


def _difference(speakers: list[int], lists: list[Bytes]) -> str:
    first, other = speakers[:2]
    (host, here), (other_host, there) = (json.loads(lists[rank].tobytes()) for rank in (first, other))
    both = [key for key in here if key in there and here[key] != there[key]]
    keys = both or [key for key in {**here, **there} if here.get(key) != there.get(key)]
    named = [
        f"{key} is {here.get(key, 'unset')} on rank {first} ({host}) and {there.get(key, 'unset')} on rank {other} "
        f"({other_host})"
        for key in keys[:NAMED]
    ]
    more = f"; {len(keys) - NAMED} more differ" if len(keys) > NAMED else ""
    return f"the ranks do not run the same: {'; '.join(named)}{more}: give all ranks the same files and options"


@cache
def _sources(package: Path) -> str:
    """The SHA-256 of a package's sources and tables, names included: what this process's first run has found."""
    summed = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.toml")]):
        summed.update(f"{path.relative_to(package)}\0".encode())
        summed.update(hashlib.sha256(path.read_bytes()).digest())
    return summed.hexdigest()
