"""One engine for all ranks: chosen by a trial on real clients, remembered in the run folder for a resumed run.

Clients are trained side by side only where a process has seen that two of them get the sequential engine's updates.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.errors import ClientFailure, UserError
from fedmpi.common.files import read_plain, write_whole, writing
from fedmpi.common.types import Bytes, Floats
from fedmpi.local.engines import CompositeEngine, LocalEngine, SingleEngine
from fedmpi.local.equality import MOST_APART, Apart, diverges
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.mpi import Cluster

log = logging.getLogger("fedmpi")

NOBODY = "nobody"
"""Instead of a verdict: no rank had a client to compare."""


class EngineTrial:
    """Decides between the candidates of a `CompositeEngine`, on all ranks alike, and tries the batched engine once.

    Every rank times the candidates on some of its own clients, and compares what a few steps of two clients give;
    rank 0 adds the times up and tells the quicker one. Where the batched engine is named by the user, or was chosen
    before the run was resumed, it is compared alone.
    """

    def __init__(self, cluster: Cluster, engine: LocalEngine, largest: int):
        self.cluster = cluster
        self.engine = engine
        self.largest = largest
        self._path: Path | None = None
        self._unproven = self._beside

    @property
    def open(self) -> bool:
        """Whether the engine is still to be chosen."""
        return isinstance(self.engine, CompositeEngine) and bool(self.engine.candidates)

    def recall(self, folder: Path | None) -> None:
        """Use the choice that the run folder holds, if any, and keep a later one there; collective."""
        if not self.open:
            return
        self._path = folder / "engine.json" if folder is not None else None
        known = self._read() if self.cluster.is_server else ""
        self._settle(known, "as in this run so far")
        self._unproven = self._beside

    def due(self, rule: LocalRule, total: Accumulator) -> bool:
        """Whether a trial, or a comparison, is to be held in this round; the same on all ranks."""
        if not (self.open or self._unproven):
            return False
        return not isinstance(self.engine, CompositeEngine) or not self.engine.merges_rows(rule, self.largest, total)

    @property
    def _beside(self) -> bool:
        """Whether it is decided that clients are trained side by side."""
        engine = self.engine
        if isinstance(engine, CompositeEngine):
            return not engine.candidates and engine.beside is not engine.sequential
        return isinstance(engine, SingleEngine) and engine.beside is not None

    def decide(
        self, tasks: Sequence[ClientTask], model: Tensor, rule: LocalRule, round: int, total: Accumulator
    ) -> None:
        """Hold the trial, with the outcome open when no rank has a client for it; collective, to be called when
        `due`.
        """
        engine = self.engine
        assert isinstance(engine, CompositeEngine | SingleEngine)
        if not self.open:
            self._prove(engine, tasks, model, rule, round, total)
            return
        assert isinstance(engine, CompositeEngine)
        work = tasks, model, rule, round, total
        found = engine.compare(*work)
        measured = self.cluster.gather(np.append(engine.time_candidates(*work), [found.apart, not found.by_rounding]))
        self._settle(*self._quickest(engine.candidates, measured) if measured is not None else ("", ""))

    def _quickest(self, candidates: Sequence[str], measured: list[Floats]) -> tuple[str, str]:
        """The quicker engine by the ranks' times, or the first one where they differ by more than rounding, and why;
        empty when nobody had a client to time."""
        clients, *seconds = np.sum(measured, axis=0)[:-2].tolist()
        if not clients:
            return "", ""
        apart = _largest(measured)
        if strange := [one for one in measured if one[-1]]:
            why = _too_far(candidates[1], strange)
            log.warning("engine trial: %s from now on: %s", candidates[0], why)
            return candidates[0], why
        by_rounding = f", as {candidates[0]} alone from a model off by a rounding" if apart > MOST_APART else ""
        log.info("engine trial: the updates of two clients differ by %.1g of their length%s", apart, by_rounding)
        per_client = {name: 1000 * total / clients for name, total in zip(candidates, seconds, strict=True)}
        quickest = min(per_client, key=lambda name: per_client[name])
        figures = ", ".join(f"{name} {milliseconds:.3g}" for name, milliseconds in per_client.items())
        log.info("engine trial on %d clients: %s ms a client: %s from now on", clients, figures, quickest)
        self._write(quickest, int(clients), per_client)
        return quickest, f"trial: {figures} ms a client"

    def _prove(
        self,
        engine: CompositeEngine | SingleEngine,
        tasks: Sequence[ClientTask],
        model: Tensor,
        rule: LocalRule,
        round: int,
        total: Accumulator,
    ) -> None:
        """Compare the engine that trains side by side with the sequential one; without clients it is left to a later
        round.
        """
        try:
            found = engine.compare(tasks, model, rule, round, total)
        except ClientFailure as failure:
            if not diverges(failure):
                raise
            found = Apart(0.0, True)
        measured = self.cluster.gather(np.array([len(tasks), found.apart, not found.by_rounding], np.float64))
        verdict = self._verdict(measured) if measured is not None else ""
        (received,) = self.cluster.broadcast([_bytes(verdict)] if self.cluster.is_server else None)
        verdict = received.tobytes().decode()
        self._unproven = verdict == NOBODY
        if verdict in (NOBODY, ""):
            return
        if isinstance(engine, CompositeEngine):
            if self.cluster.is_server:
                log.warning("engines compared: sequential from now on: %s", verdict)
            engine.fall_back(verdict)
            return
        trained = engine.sequential.model
        model_class = type(trained.module).__name__
        raise UserError(
            f'local.engine = "{engine.name}" does not train {model_class} as it is trained alone: in round {round} '
            f'{verdict}; choose "auto" or "sequential"'
        )

    def _verdict(self, measured: list[Floats]) -> str:
        """Why clients may not be trained side by side; "" if they may, NOBODY where no rank had one to compare."""
        if not sum(float(one[0]) for one in measured):
            return NOBODY
        if strange := [one for one in measured if one[-1]]:
            return _too_far("batched", strange)
        log.info(
            "engines compared: the updates of two clients side by side and alone differ by %.1g of their length",
            _largest(measured),
        )
        return ""

    def _settle(self, name: str, why: str) -> None:
        """Tell all ranks rank 0's choice; an empty name leaves it open."""
        received = self.cluster.broadcast([_bytes(name), _bytes(why)] if self.cluster.is_server else None)
        name, why = (array.tobytes().decode() for array in received)
        if name:
            assert isinstance(self.engine, CompositeEngine)
            self.engine.settle(name, why)

    def _read(self) -> str:
        if self._path is None or not os.path.lexists(self._path):
            return ""
        assert isinstance(self.engine, CompositeEngine)
        try:
            name = json.loads(read_plain(self._path))["engine"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            name = None
        if name not in self.engine.candidates:
            log.warning("%s names no engine of this run: the trial is held again", self._path)
            return ""
        return str(name)

    def _write(self, name: str, clients: int, milliseconds: dict[str, float]) -> None:
        if self._path is None:
            return
        content = {"engine": name, "trial_clients": clients, "milliseconds_per_client": milliseconds}
        with writing(self._path.parent):
            write_whole(self._path, (json.dumps(content, indent=2) + "\n").encode())


def _too_far(name: str, measured: list[Floats]) -> str:
    """That an engine differs from the sequential one."""
    return (
        f"{name} differs from sequential by {_largest(measured):.1g} of an update on two clients, "
        f"more than {MOST_APART:g} and than a rounding makes of it alone"
    )


def _largest(measured: list[Floats]) -> float:
    """How far the engines lie apart on the rank where it is most."""
    return max((float(one[-2]) for one in measured), key=lambda one: np.inf if np.isnan(one) else one)


def _bytes(text: str) -> Bytes:
    return np.frombuffer(text.encode(), np.uint8)
