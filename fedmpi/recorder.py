"""The folder of a run, written by rank 0 alone: configuration, records, summary, log, TensorBoard events, model.

Records are appended as one JSON line a round; every other file is written whole or not at all.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from fedmpi.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint, write_whole
from fedmpi.cluster import Cluster
from fedmpi.config import Config, config_toml
from fedmpi.errors import UserError
from fedmpi.progress import TerminalWarnings
from fedmpi.refusal import on_server
from fedmpi.traffic import cost_to_target

log = logging.getLogger("fedmpi")
Record = dict[str, Any]


class Recorder:
    """Writes a run's folder.

    Parameters
    ----------
    folder : Path
        RUN; created when it does not exist.
    config : Config
        Written as RUN/config.toml.
    resume : bool
        Continue the run that the folder holds, if it holds one.

    Raises
    ------
    UserError
        When the folder cannot be written, holds another run (without `resume`) or a run of another configuration.
    """

    def __init__(self, folder: Path, config: Config, resume: bool):
        self.folder = folder
        self.config = config
        self._claim(resume)
        self._handler = logging.FileHandler(folder / "run.log")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._warnings = TerminalWarnings()
        log.addHandler(self._handler)
        log.addHandler(self._warnings)
        log.setLevel(logging.INFO)
        self._events: SummaryWriter | None = None
        self._best: Record = {}
        self._last: Record = {}
        self._accuracies: list[float | None] = []
        self._round_bytes: list[int] = []
        self._links = dict.fromkeys((*LINKS, "paper_formula"), 0)
        self._started = time.perf_counter()
        self._seconds_before = 0.0

    def _claim(self, resume: bool) -> None:
        text = config_toml(self.config)
        path = self.folder / "config.toml"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and not resume:
                raise UserError(
                    f"{self.folder} holds a run already: add --resume to continue it, or choose another --out"
                )
            if path.exists() and path.read_text() != text:
                raise UserError(
                    f"{path} differs from the configuration given: resume with the same one, or choose another --out"
                )
            write_whole(path, text.encode())
        except OSError as error:
            raise UserError(
                f"cannot write the run folder {self.folder} ({error.strerror}): choose another --out"
            ) from error

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint, with the records after it removed; None when the run starts at round 0.

        Called once, before the first record is written.
        """
        checkpoint = newest_checkpoint(self.folder / "checkpoints")
        settled = checkpoint.header["settled"] if checkpoint else 0
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines[:settled] if line.endswith(b"\n")]
        write_whole(path, b"".join(kept))
        for line in kept:
            self._remember(json.loads(line))
        if self.config.logging.tensorboard:
            self._events = SummaryWriter(str(self.folder), purge_step=len(kept))
        if checkpoint:
            self._seconds_before = float(checkpoint.header["seconds"])
            log.info("resumed at round %d", checkpoint.next_round)
        return checkpoint

    def write(self, record: Record) -> None:
        """Append one round's record to metrics.jsonl and TensorBoard."""
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._remember(record)
        if self._events is not None:
            for key, value in record.items():
                if isinstance(value, (int, float)) and key != "round":
                    self._events.add_scalar(key, value, record["round"])

    def checkpoint(self, next_round: int, tensors: dict[str, Tensor], header: Record) -> None:
        """Save a checkpoint from which the run goes on at `next_round`, after the records that it counts on."""
        self._sync()
        seconds = self._seconds_before + time.perf_counter() - self._started
        checkpoint = Checkpoint(next_round, tensors, {**header, "seconds": seconds})
        save_checkpoint(self.folder / "checkpoints", checkpoint, self.config.checkpoint.keep)

    def finish(self, model: dict[str, Tensor], facts: Record) -> Record:
        """Write the final model and the summary; returns the summary."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}
        write_whole(self.folder / "model.safetensors", save(tensors))
        summary: Record = {
            "final": {k: v for k, v in self._last.items() if k.startswith("test_") or k in ("round", "train_loss")},
            "best_test_accuracy": self._best.get("test_accuracy"),
            "best_round": self._best.get("round"),
            "wall_seconds": self._seconds_before + time.perf_counter() - self._started,
            "bytes_total": sum(self._round_bytes),
            **{f"bytes_{link}": count for link, count in self._links.items() if count},
            **facts,
        }
        if self.config.evaluation.target_accuracy is not None:
            summary["target_accuracy"] = self.config.evaluation.target_accuracy
            summary |= self._cost_to_target(self.config.evaluation.target_accuracy)
        write_whole(self.folder / "summary.json", (json.dumps(finite(summary), indent=2) + "\n").encode())
        return summary

    def close(self) -> None:
        """Flush and close the log and the events."""
        if self._events is not None:
            self._events.close()
        log.removeHandler(self._warnings)
        log.removeHandler(self._handler)
        self._handler.close()

    def _sync(self) -> None:
        with open(self.folder / "metrics.jsonl", "a") as file:
            os.fsync(file.fileno())
        if self._events is not None:
            self._events.flush()

    def _remember(self, record: Record) -> None:
        self._last = {**self._last, **record} if "test_accuracy" not in record else record
        for link in self._links:
            self._links[link] += int(record.get(f"bytes_{link}", 0))
        accuracy = record.get("test_accuracy")
        self._accuracies.append(accuracy)
        self._round_bytes.append(sum(int(record.get(f"bytes_{link}", 0)) for link in LINKS))
        if accuracy is not None and accuracy > self._best.get("test_accuracy", -1.0):
            self._best = record

    def _cost_to_target(self, target: float) -> Record:
        """Rounds and megabytes up to the first evaluation that reached the target (Astraea, Table III)."""
        cost = cost_to_target(self._accuracies, self._round_bytes, target)
        return {
            "rounds_to_target": cost.rounds if cost else None,
            "megabytes_to_target": cost.megabytes if cost else None,
        }


LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")


def open_recorder(cluster: Cluster, folder: Path, config: Config, resume: bool) -> Recorder | None:
    """The recorder on rank 0, None on the others; a folder that cannot be used is refused by all ranks together."""
    return on_server(cluster, lambda: Recorder(folder, config, resume))


def finite(value: Any) -> Any:
    """The value as strict JSON can hold it: numbers that are infinite or not a number become null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
