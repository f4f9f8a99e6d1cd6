"""What all ranks must agree on, and how it is noticed when they do not: devices, traits, work done, models.

Ranks may run on unlike nodes. Whatever one of them finds out about its own node or by trying is made known to all
before anything is decided by it, and after every round the work done is compared with the plan.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmpi.cluster import Cluster
from fedmpi.cluster.on_server import on_server
from fedmpi.common.errors import RanksDisagree, UserError
from fedmpi.common.plan import Plan
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription
from fedmpi.local.traits import ForwardTraits, adopt_traits, check_type, forward_traits
from fedmpi.models.flat import FlatModel

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64 (Steele, Lea & Flood 2014)."""
FINGERPRINT_BITS = 40
"""Sums of so many bits over up to 4096 ranks are exact in float64."""


def refuse_mixed_devices(cluster: Cluster, device: torch.device) -> None:
    """All ranks compute on one kind of device; collective.

    Every rank takes the server's step for itself, and must come to the same bits. Processors and GPUs do not round all
    operations alike: a division by a number is one on the former and a product with its reciprocal on the latter.
    """
    gathered = cluster.gather(np.frombuffer(device.type.encode(), np.uint8))

    def refuse() -> None:
        kinds = Counter(kind.tobytes().decode() for kind in gathered or [])
        if len(kinds) > 1:
            found = ", ".join(f"{count} on {kind}" for kind, count in sorted(kinds.items()))
            raise UserError(
                f"the ranks of this job have different kinds of devices ({found}), whose results differ in their last "
                'bits: set cluster.device = "cpu", or start all ranks on nodes with GPUs'
            )

    on_server(cluster, refuse)


def places_on_node(cluster: Cluster, device: torch.device) -> int:
    """How many ranks the node with the fewest has cores for, or GPUs, the same on all ranks; collective."""
    if device.type == "cpu":
        return cluster.fewest_cores
    return -cluster.maximum(-torch.cuda.device_count())


def agree_on_values(cluster: Cluster, model: FlatModel) -> None:
    """All ranks must hold a model of as many values, and the same values where these never travel; collective."""
    gathered = cluster.gather(np.array([model.trainable, model.size, model.frozen_checksum], np.int64))

    def refuse() -> None:
        found = np.stack(gathered or [np.zeros(3, np.int64)])
        other = found != found[0]
        if sized := np.flatnonzero(other[:, :2].any(axis=1)).tolist():
            values = ", ".join(f"{found[rank, 1]} on rank {rank}" for rank in (0, sized[0]))
            raise UserError(
                f"the ranks made models of different sizes ({values} values): model.name must make the same one from "
                "the same description and options, whatever the rank, the host or the time"
            )
        if others := np.flatnonzero(other[:, 2]).tolist():
            raise UserError(
                f"the model's frozen values, which never travel, are others on ranks {others} than on rank 0: make "
                "them with torch's own random numbers, which are seeded alike, or read them from one file"
            )

    on_server(cluster, refuse)


def agree_on_traits(cluster: Cluster, model: FlatModel, description: DataDescription) -> None:
    """What one rank found out about the model by trying it counts for all; collective."""
    own = astuple(forward_traits(model, description))
    check_type(model, description)
    adopt_traits(model, ForwardTraits(*(type(trait)(cluster.maximum(int(trait))) for trait in own)))


@dataclass(frozen=True)
class TakenClients:
    """Which of the plan's participants a rank took for its own in a round; summed over the ranks."""

    places: int = 0  # How many it took
    # The sum of their keyed marks; on rank 0 less that of the plan's, so that the ranks' add up to 0
    fingerprint: int = 0
    due: int = 0  # Those of them with rows to train on

    @classmethod
    def of(cls, plan: Plan, members: Ints, due: int, server: bool) -> TakenClients:
        """That of a rank which took the participants at the places `members`, `due` of them with rows."""
        mark = fingerprint(plan.round, plan.clients[members])
        if server:
            mark -= fingerprint(plan.round, plan.clients)
        return cls(len(members), _modulo(mark), due)


def _modulo(value: int) -> int:
    return value & ((1 << FINGERPRINT_BITS) - 1)


def fingerprint(round: int, clients: Ints) -> int:
    """The sum of 40-bit marks of the clients, modulo 2**40: whoever is missing or twice shows.

    The mark of client k in round t is h(t, k + 1) - h(t, k), h being a hash (splitmix64). A sum of marks is 0 only
    where every client counts as often as its neighbours, but for accidents (one in 2**40), and that of a run of
    neighbours is the hash behind it less the hash at its front: a million neighbours cost two hashes and the look for
    gaps.
    """
    if not len(clients):
        return 0
    gaps = np.flatnonzero(clients[1:] - clients[:-1] != 1)
    fronts, behind = clients[np.append(0, gaps + 1)], clients[np.append(gaps, len(clients) - 1)] + 1
    return _modulo(int(_hashes(round, behind).sum()) - int(_hashes(round, fronts).sum()))


def _hashes(round: int, values: Ints) -> NDArray[np.uint64]:
    """40-bit hashes of round and value."""
    mixed = values.astype(np.uint64) + np.array([(round + 1) * GOLDEN % 2**64], np.uint64)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed >> np.uint64(64 - FINGERPRINT_BITS)


def check_work(plan: Plan, sums: dict[str, float], expected: int | None, visits_each: int | None) -> None:
    """Compare the work that all ranks did in a round with the plan; every rank has the same sums and raises alike."""
    places, due, trained, planned = (round(sums[name]) for name in ("places", "due", "clients", "fingerprint"))
    participants = len(plan.clients)
    if places != participants:
        _disagree(plan, f"{participants} participants are planned, but the ranks took {places} for theirs")
    if _modulo(planned):
        _disagree(plan, f"the ranks took {places} participants for theirs, but some of them twice and others not")
    worked = trained + round(sums["diverged"])
    if worked != due or (expected is not None and worked != expected):
        due = due if expected is None else expected
        _disagree(plan, f"{due} participants have samples to train on, but {worked} were trained")
    if visits_each is not None and (visits := round(sums["visits"])) != visits_each * due:
        _disagree(plan, f"{visits_each * due} visits of mediators are planned, but there were {visits}")


def _disagree(plan: Plan, what: str) -> None:
    raise RanksDisagree(
        f"round {plan.round}: {what}: the ranks do not work on the same plan with the same data, and the run is ended"
    )


def check_models(
    cluster: Cluster, model: Tensor, round: int, further: Sequence[Tensor] = (), parts: Sequence[str] = ()
) -> None:
    """All ranks must hold the same model, and further vectors of the server, after a round; collective."""
    checksum = zlib.crc32(model.cpu().numpy().data)
    for vector in further:
        checksum = zlib.crc32(vector.cpu().numpy().data, checksum)
    own = np.array([checksum], np.int64)
    gathered = cluster.gather(own)
    checksums = cluster.broadcast([np.concatenate(gathered)] if gathered is not None else None)[0]
    others = np.flatnonzero(checksums != checksums[0]).tolist()
    if others:
        asked = f"does a part of your own ({', '.join(parts)}) give different results on different ranks, or "
        raise RanksDisagree(
            f"the ranks hold different models after round {round}: not that of rank 0 have ranks {others}; "
            f"{asked if parts else ''}are the nodes' processors, or torch versions, unlike?"
        )
