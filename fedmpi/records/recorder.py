"""Run folder, written by rank 0: configuration, records, summary, log, TensorBoard events, model.

Records are appended as one JSON line per round; every other file is written atomically. Only `--resume` continues the
run in a folder, and only the run of its config.toml.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import lock_folder, make_folder, remedy, sync_folder, write_whole, writing
from fedmpi.common.types import Ints
from fedmpi.config import Config, config_toml
from fedmpi.config.writing import not_repeatable
from fedmpi.mpi import Cluster
from fedmpi.mpi.ranks import on_server
from fedmpi.records.checkpoint import Checkpoint, copied, model_file, newest_checkpoint, save_checkpoint
from fedmpi.records.history import BestRound, History, Record, as_line
from fedmpi.records.progress import RunLog, tags
from fedmpi.records.provenance import changes_since, data_mark, digests, keep_sources, part_sources
from fedmpi.records.tables import confusion_csv, drop_tables_after, write_tables

log = logging.getLogger("fedmpi")
FINAL = ("summary.json", "model.safetensors", "confusion.csv")
"""Files about the final model."""
OF_A_RUN = ("summary.json", "metrics.jsonl", "checkpoints")
"""Files and folders without which a folder holds no run."""


class Recorder:
    """Writer of a run folder."""

    def __init__(self, folder: Path, config: Config, resume: bool, data: str = ""):
        self.folder = folder
        self.config = config
        self.history = History(config)
        self.checkpoints = folder / "checkpoints"
        self._data, self._mark = data, data_mark(config, data).encode()
        self._sources = part_sources(config, warns=True)
        self._changes: list[tuple[str, str, str]] = []
        self._events: Any = None  # TensorBoard's SummaryWriter
        self._summed = hashlib.sha256()
        try:
            make_folder(folder)
            self._lock = lock_folder(folder)
            try:
                self._claim(resume)
                self._log = RunLog(folder / "run.log")
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise UserError(
                f"cannot write the run folder {folder} ({error.strerror or error}). {remedy(error)}, or choose another "
                "--out"
            ) from error
        self._thread = ThreadPoolExecutor(1, "fedmpi-checkpoint")
        self._saving: Future[None] | None = None
        for sentence in not_repeatable(config):
            log.warning("%s", sentence)

    def _claim(self, resume: bool) -> None:
        """Write the first files of a run, or compare those of the run that is to be continued."""
        path = self.folder / "config.toml"
        trained = [name for name in OF_A_RUN if (self.folder / name).exists()]
        if trained and not path.exists():
            raise UserError(f"{self.folder} contains {trained[0]} but no config.toml of its run. Choose another --out")
        if path.exists() and not resume:
            raise UserError(
                f"{self.folder} holds a run already. Add --resume to continue it (resume=True in Python), or choose "
                "another --out"
            )
        if path.exists():
            self._changes = changes_since(path, self.config)
        else:
            write_whole(path, self._mark, config_toml(self.config).encode())
        begun = (self.folder / "summary.json").exists() or any(self.checkpoints.glob("*"))
        keep_sources(self.folder, self._sources, resumed=begun)

    def resume(self) -> Checkpoint | None:
        """Return the newest checkpoint after removing the records after it; None if the run starts at round 0.

        Called once, before the first record is written.
        """
        with writing(self.folder):
            checkpoint = newest_checkpoint(self.checkpoints)
            if checkpoint and checkpoint.header.get("data", "") != self._data:
                raise UserError(
                    f"{self.config.data.source.name} holds other data than those that {self.folder} was trained on up "
                    f"to round {checkpoint.next_round}. Prepare them as they were, or choose another --out"
                )
            path = self.folder / "metrics.jsonl"
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if checkpoint is None:
                if (self.folder / "summary.json").exists():
                    raise UserError(
                        f"{self.folder} holds a finished run and no checkpoint to resume. Choose another --out"
                    )
                if lines:
                    what = "no checkpoint in %s: begins again at round 0, %d records are dropped"
                    log.warning(what, self.folder, len(lines))
                first, kept = 0, []
            else:
                first, kept = checkpoint.next_round, lines[: checkpoint.header["settled"]]
                self._summed.update(b"".join(kept))
                if checkpoint.header.get("records") != self._summed.hexdigest():
                    raise UserError(
                        f"{path} differs from what was written up to round {first}. Put the file back, or choose "
                        "another --out"
                    )
                self.history.seconds_before = float(checkpoint.header["seconds"])
            self.history.lines = kept
            self._take_changes(first)
            drop_tables_after(self.folder, first)
            write_whole(path, *kept)
            if self.config.logging.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                self._events = SummaryWriter(str(self.folder), purge_step=len(kept))
        if checkpoint:
            log.info("resumed at round %d", first)
        return checkpoint

    def _take_changes(self, next_round: int) -> None:
        """Write changed settings to config.toml, and remove the final files of a run that gets more rounds."""
        if next_round > self.config.rounds:
            raise UserError(
                f"{self.folder} has done {next_round} rounds already, more than rounds = {self.config.rounds}. Give "
                f"rounds = {next_round} or more, or choose another --out"
            )
        if next_round < self.config.rounds and not BestRound(self.config, self.history.records).exhausted:
            for name in FINAL:  # a summary implies a final model
                (self.folder / name).unlink(missing_ok=True)
        if self._changes:
            write_whole(self.folder / "config.toml", self._mark, config_toml(self.config).encode())
        for key, old, new in self._changes:
            log.info("changed before round %d: %s: %s -> %s", next_round, key, old, new)

    def write(self, record: Record) -> None:
        """Append one round's record to metrics.jsonl and TensorBoard."""
        if self._saving is not None and self._saving.done():
            self.saved()  # raises its error
        line = as_line(record)
        with writing(self.folder):
            with open(self.folder / "metrics.jsonl", "ab") as file:
                file.write(line)
            self._summed.update(line)
            self.history.lines.append(line)
            if self._events is not None:
                for name, value in tags(record).items():
                    self._events.add_scalar(name, value, record["round"])

    def checkpoint(
        self, next_round: int, tensors: dict[str, Tensor], header: Record, best: bytes | None = None
    ) -> None:
        """Save a checkpoint from which the run resumes at `next_round`, and the best model if it is a new one.

        The present values are copied and written during the following rounds; the next call raises an error of that.
        """
        self.saved()
        counted: Record = {"seconds": self.history.seconds, "records": self._summed.hexdigest()}
        checkpoint = copied(next_round, tensors, {**header, **counted})
        tables = self.history.take_tables()

        def save() -> None:
            with writing(self.folder):
                with open(self.folder / "metrics.jsonl", "a") as file:
                    os.fsync(file.fileno())  # the checkpoint counts on the records
                sync_folder(self.folder)
                if self._events is not None:
                    self._events.flush()
                write_tables(self.folder, tables, next_round)
                self.write_best(best)
                save_checkpoint(self.checkpoints, checkpoint, self.config.checkpoint.keep)

        self._saving = self._thread.submit(save)

    def write_best(self, best: bytes | None) -> None:
        """Write the model of the best round, if it is a new one."""
        if best is not None:
            with writing(self.folder):
                write_whole(self.folder / "model-best.safetensors", best)

    def saved(self) -> None:
        """Wait until the last checkpoint is on the disk, and raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def finish(
        self, model: nn.Module, facts: Record, confusion: Ints | None = None, classes: Sequence[str] = ()
    ) -> Record:
        """Write the final model, its confusion matrix (C, C) if known, and the summary; return the summary."""
        self.saved()
        with writing(self.folder):
            write_tables(self.folder, self.history.take_tables(), self.history.rounds + 1)
            write_whole(self.folder / "model.safetensors", model_file(model))
            if confusion is not None:
                write_whole(self.folder / "confusion.csv", confusion_csv(confusion, classes))
            kept = {"plugins": digests(self._sources)} if self._sources else {}
            summary = self.history.summary(facts | kept)
            write_whole(self.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        return summary

    def failed(self, error: Exception) -> None:
        """Log the error that ends the run."""
        self._log.failed(error)

    def close(self) -> None:
        """Wait for the last checkpoint; close the log and the events."""
        try:
            try:
                self.saved()
            except RunFailure as failure:  # the run has already ended with another failure
                log.warning("%s", failure)
            with writing(self.folder):
                if self._events is not None:
                    self._events.close()
        finally:
            self._thread.shutdown(wait=False)
            with suppress(OSError):
                self._log.close()
            self._lock.release()


def open_recorder(
    cluster: Cluster, folder: Path | None, config: Config, resume: bool, model: nn.Module, data: str
) -> Recorder | None:
    """Return the recorder on rank 0, None on other ranks or without a folder.

    All ranks together reject an unusable folder, and a `model` that could not be saved at the end.
    """

    def opened() -> Recorder | None:
        if folder is None:
            return None
        model_file(model)
        return Recorder(folder, config, resume, data)

    return on_server(cluster, opened)
