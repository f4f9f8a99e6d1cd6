"""One engine for all ranks: chosen by a trial on real clients, remembered in the run folder for a resumed run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.cluster import Cluster
from fedmpi.common.files import read_plain, write_whole, writing
from fedmpi.local.engines import CompositeEngine, LocalEngine
from fedmpi.local.work import ClientTask, LocalRule

log = logging.getLogger("fedmpi")

MOST_APART = 1e-3
"""Relative difference of two engines' updates after a few steps that is looked into: whether rounding explains it."""


class EngineTrial:
    """Decides between the candidates of a `CompositeEngine`, on all ranks alike.

    Every rank times the candidates on some of its own clients, and compares what a few steps of two clients give;
    rank 0 adds the times up and tells the quicker one.

    Parameters
    ----------
    cluster : Cluster
    engine : LocalEngine
        Nothing is to be decided unless it is a `CompositeEngine` with candidates.
    largest : int
        Samples of the largest client: where even this one is merged, nothing is to be decided either.
    """

    def __init__(self, cluster: Cluster, engine: LocalEngine, largest: int):
        self.cluster = cluster
        self.engine = engine
        self.largest = largest
        self._path: Path | None = None

    @property
    def open(self) -> bool:
        """Whether the engine is still to be chosen."""
        return isinstance(self.engine, CompositeEngine) and bool(self.engine.candidates)

    def recall(self, folder: Path | None) -> None:
        """Use the choice that the run folder holds, if any, and keep a later one there; collective.

        Parameters
        ----------
        folder : Path or None
            The run folder, on rank 0; None on the others and in runs without records.
        """
        if not self.open:
            return
        self._path = folder / "engine.json" if folder is not None else None
        known = self._read() if self.cluster.is_server else ""
        self._settle(known, "as in this run so far")

    def due(self, rule: LocalRule, total: Accumulator) -> bool:
        """Whether a trial is to be held in this round; the same on all ranks."""
        engine = self.engine
        if not isinstance(engine, CompositeEngine) or not engine.candidates:
            return False
        return not engine.merges_rows(rule, self.largest, total)

    def decide(
        self, tasks: Sequence[ClientTask], model: Tensor, rule: LocalRule, round: int, total: Accumulator
    ) -> None:
        """Hold the trial, with the outcome open when no rank has a client for it; collective, to be called when `due`.

        Parameters
        ----------
        tasks, model, rule, round, total
            This rank's work, as for `Engine.train`.
        """
        engine = self.engine
        assert isinstance(engine, CompositeEngine)
        work = tasks, model, rule, round, total
        apart = engine.compare_candidates(*work)
        strange = not apart <= MOST_APART and not engine.apart_by_rounding(apart, *work)
        measured = self.cluster.gather(np.append(engine.time_candidates(*work), [apart, strange]))
        self._settle(*self._quickest(engine.candidates, measured) if measured is not None else ("", ""))

    def _quickest(self, candidates: Sequence[str], measured: list[np.ndarray]) -> tuple[str, str]:
        """The quicker engine by the ranks' times, or the first one where they differ by more than rounding, and why;
        empty when nobody had a client to time."""
        clients, *seconds = np.sum(measured, axis=0)[:-2].tolist()
        if not clients:
            return "", ""
        apart = _largest(measured)
        if strange := [one for one in measured if one[-1]]:
            why = (
                f"{candidates[1]} differs from it by {_largest(strange):.1g} of an update on two clients, "
                f"more than {MOST_APART:g} and than a rounding makes of it alone"
            )
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

    def _settle(self, name: str, why: str) -> None:
        """Tell all ranks rank 0's choice; an empty name leaves it open."""
        told = self.cluster.broadcast([_bytes(name), _bytes(why)] if self.cluster.is_server else None)
        name, why = (array.tobytes().decode() for array in told)
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


def _largest(measured: list[np.ndarray]) -> float:
    """How far the engines lie apart on the rank where it is most."""
    return max((float(one[-2]) for one in measured), key=lambda one: np.inf if np.isnan(one) else one)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
