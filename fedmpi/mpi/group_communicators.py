"""The sub-communicators of a job: who has one, in what order they are made and freed.

MPI can hold only so many communicators (MPICH's contexts: 2,048 a process), and making or freeing one takes all of its
members. So all ranks are told all groups of a round, their own or not, and each works out alike which of them have a
communicator: those used last, `MOST_COMMUNICATORS` in the whole job at most. All free and then make them in one order
common to all ranks, so that the first one in that order that is not done yet has all its members waiting for it: it
cannot deadlock, even where freeing waits for the others. Groups beyond that number exchange their messages over one
communicator of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from fedmpi.mpi.communicators import meet_members
from fedmpi.mpi.counters import BytesMoved
from fedmpi.mpi.pending_sends import PendingSends, progress_beside_work
from fedmpi.mpi.rank_group import RankGroup
from fedmpi.mpi.waiting import meet

if TYPE_CHECKING:
    from mpi4py import MPI

Ranks = tuple[int, ...]

MOST_COMMUNICATORS = 1024
"""Of all ranks together: whatever contexts two members hold, one is left for both of them."""
TAGS = 32768  # the MPI standard promises tags up to 32,767


class Recent:
    """Which groups have a communicator: those used last. Ranks that admit the same groups agree about it."""

    def __init__(self, most: int):
        self._most = most
        self._held: dict[Ranks, None] = {}  # the one used longest ago first

    def __contains__(self, ranks: Ranks) -> bool:
        return ranks in self._held

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, wanted: Iterable[Ranks]) -> tuple[list[Ranks], list[Ranks]]:
        """Use these groups next."""
        distinct = dict.fromkeys(wanted)
        kept = [ranks for ranks in distinct if ranks in self._held]
        made = [ranks for ranks in distinct if ranks not in self._held][: self._most - len(kept)]
        idle = [ranks for ranks in self._held if ranks not in distinct]
        freed = idle[: max(0, len(self._held) + len(made) - self._most)]
        for ranks in (*freed, *kept):
            del self._held[ranks]
        self._held.update(dict.fromkeys((*kept, *made)))
        return freed, made


class Groups:
    """The groups that this rank is in."""

    def __init__(self, world: MPI.Intracomm | None, moved: BytesMoved):
        self._world = world
        self._moved = moved
        self._pending = PendingSends(progress_beside_work(world))
        self._recent = Recent(MOST_COMMUNICATORS)
        self._own: dict[Ranks, RankGroup] = {}
        self._guests: dict[Ranks, RankGroup] = {}
        self._common: MPI.Intracomm | None = None

    def get(self, wanted: Sequence[Ranks], rank: int) -> list[RankGroup | None]:
        """The groups of these ranks, None for those that this rank is not in; see `Cluster.groups`."""
        for ranks in wanted:
            if not ranks or len(set(ranks)) < len(ranks):
                raise ValueError(f"the ranks {ranks} are no group: each rank once, and at least one")
        self._close(self._guests, [*self._guests])
        several = [ranks for ranks in wanted if len(ranks) > 1]
        freed, made = self._recent.admit(several)
        self._close(self._own, freed)
        for ranks in made:
            if rank in ranks:
                self._own[ranks] = RankGroup(self._create(ranks), ranks, self._moved, self._pending)
        if any(ranks not in self._recent for ranks in several):
            self._share()
        return [self._find(ranks) if rank in ranks else None for ranks in wanted]

    def end_round(self) -> None:
        """Let everything sent leave."""
        self._pending.flush()

    def close(self) -> None:
        """Free all groups."""
        self._close(self._guests, [*self._guests])
        self._close(self._own, [*self._own])
        self._pending.flush()
        if self._common is not None:
            self._common.Free()
            self._common = None

    def _find(self, ranks: Ranks) -> RankGroup:
        if ranks in self._own:
            return self._own[ranks]
        if ranks not in self._guests:
            common = self._common if len(ranks) > 1 else None
            self._guests[ranks] = RankGroup(common, ranks, self._moved, self._pending, addresses=ranks)
        return self._guests[ranks]

    @staticmethod
    def _close(groups: dict[Ranks, RankGroup], which: Iterable[Ranks]) -> None:
        for ranks in which:
            if ranks in groups:
                groups.pop(ranks).close()

    def _create(self, ranks: Ranks) -> MPI.Intracomm | None:
        if self._world is None:
            return None
        tag = crc32(np.array(ranks, np.int64).tobytes()) % TAGS
        meet_members(self._world, ranks, tag)
        world = self._world.Get_group()
        members = world.Incl(ranks)
        comm = self._world.Create_group(members, tag)
        members.Free()
        world.Free()
        return comm

    def _share(self) -> None:
        """Make the communicator of the groups that have none of their own, when they first occur; collective."""
        if self._common is None and self._world is not None:
            meet(self._world)
            self._common = self._world.Dup()
