"""Going on when ranks die (`cluster.on_rank_failure` = "shrink"): what the others go on from, and how.

Those that live put the run together anew, in the same processes: who owns which clients, sums, groups and everything
else is then that of a run on so many ranks. It goes on from the state at the start of the round at work, of which
rank 0 keeps a copy in memory. Where rank 0 has died, or where the state lies with the ranks (vectors kept for clients,
residuals of compressed updates), it goes on from the last checkpoint of the run's folder as with --resume, and without
one from the start. Plans and streams are functions of seed, round and client, so the rounds that are done again are the
same.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from fedmpi.cluster import Cluster, RankLost, world_rank
from fedmpi.cluster.living import all_done, is_loss, living_ranks, refuse_fatal_losses, shrink, stop_everyone
from fedmpi.common.activity import PHASES, activity
from fedmpi.common.processes import Process
from fedmpi.process.watchdog import processes
from fedmpi.records.checkpoint import Checkpoint
from fedmpi.records.history import History, Record
from fedmpi.records.hold import take_for_dead

log = logging.getLogger("fedmpi")
T = TypeVar("T")


@dataclass
class LostRank:
    """A rank that died, for the summary.

    Attributes
    ----------
    rank, host, pid
        Among those that were launched; None where it died before all knew one another.
    phase, round : str, int or None
        Where rank 0 was when it heard of that.
    resumed_at : int or None
        The round from which the others have gone on; None until they do.
    ranks : list of int
        Those that went on.
    """

    rank: int
    host: str | None
    pid: int | None
    phase: str
    round: int | None
    resumed_at: int | None
    ranks: list[int]

    def __str__(self) -> str:
        where = f" on {self.host} (process {self.pid})" if self.host else ""
        when = f"in the {self.phase} of " + ("the run" if self.round is None else f"round {self.round}")
        return f"rank {self.rank}{where} has died {when}"


class Recovery:
    """A run that goes on when ranks die, over all its attempts.

    Attributes
    ----------
    state : Checkpoint or None
        The run at the start of the round at work, on rank 0, where all of the state lies there.
    history : History or None
        That of the attempt which `state` is of.
    begun : bool
        Whether the run's folder has been taken: from then on it is this run's to go on with.
    losses : list of LostRank
        So far.

    Raises
    ------
    UserError
        This job does not outlive the death of a rank.
    """

    def __init__(self) -> None:
        refuse_fatal_losses()
        activity.begin()
        self.state: Checkpoint | None = None
        self.history: History | None = None
        self.begun = False
        self.losses: list[LostRank] = []
        self._processes: dict[int, Process] = {}

    def run(self, attempt: Callable[[Recovery], T]) -> T:
        """What an attempt gives that no rank's death has ended; each uses `surviving` around all that communicates."""
        while True:
            try:
                return attempt(self)
            except RankLost:
                pass
            gc.collect()  # models and windows of the attempt before, which its frames have held
            self._go_on()

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Around an attempt, on all ranks: it ends on all of them alike, done or with RankLost.

        Raises
        ------
        RankLost
            A rank has died.
        """
        try:
            yield
        except BaseException as error:
            if not is_loss(error):
                raise
        else:
            if all_done(True):
                return
            stop_everyone()
            raise RankLost
        stop_everyone()
        all_done(False)
        raise RankLost

    def meet(self, cluster: Cluster) -> None:
        """Learn which processes the ranks are, while all of them live; collective."""
        if not self._processes and not self.losses:
            self._processes = dict(zip(living_ranks(), processes(cluster), strict=True))

    def _go_on(self) -> None:
        """Shrink the job to the ranks that live, and note those that died; collective among them."""
        dead = shrink()
        if not dead:
            raise RuntimeError("MPI has told of a dead rank, but all live: the run cannot go on")
        left = living_ranks()
        phase, round = PHASES[activity.phase], activity.round
        for rank in dead:
            process = self._processes.get(rank)
            if process is not None:
                take_for_dead(process)
            host, pid = (process.host, process.pid) if process else (None, None)
            self.losses.append(LostRank(rank, host, pid, phase, None if round < 0 else round, None, left))

    def went_on(self, round: int) -> None:
        """Note, and say on the first rank that lives, from which round the run goes on after the latest losses."""
        for loss in self.losses:
            if loss.resumed_at is None:
                loss.resumed_at = round
                if not world_rank():
                    log.warning("%s: %s from round %d on", loss, _go(loss.ranks), round)

    def facts(self) -> Record:
        """The summary's entry `lost_ranks`; none where nobody died."""
        return {"lost_ranks": [asdict(loss) for loss in self.losses]} if self.losses else {}


def _go(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} goes on alone"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} go on without it"
