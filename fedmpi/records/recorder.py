"""Run folder, written by rank 0: configuration, records, summary, log, TensorBoard events, model.

Records are appended as one JSON line per round; every other file is written atomically. Only `--resume` continues the
run in a folder, and only the run of its config.toml.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import make_folder, remedy, sync_folder, write_whole, writing
from fedmpi.config import Config, config_toml
from fedmpi.config.writing import not_repeatable
from fedmpi.mpi import Cluster
from fedmpi.mpi.ranks import on_server
from fedmpi.records.checkpoint import Checkpoint, copied, model_file, newest_checkpoint, save_checkpoint
from fedmpi.records.history import History, Record, as_line
from fedmpi.records.hold import Hold
from fedmpi.records.progress import RunLog, TensorBoard
from fedmpi.records.provenance import (
    FOLDER,
    changes_since,
    data_mark,
    digests,
    has_trained,
    keep_sources,
    part_sources,
)
from fedmpi.records.tables import CLASSES, CLIENTS, CONFUSION, ClientTable, Confusion

log = logging.getLogger("fedmpi")
FINAL = ("summary.json", "model.safetensors", CONFUSION, CLASSES)
"""Files about the final model."""
OF_A_RUN = ("config.toml", "metrics.jsonl", "run.log", *FINAL, CLIENTS, "checkpoints", FOLDER)
"""All files and folders of a run except TensorBoard's events."""


class Recorder:
    """Writer of a run folder."""

    def __init__(self, folder: Path, config: Config, resume: bool, data: str = ""):
        self.folder = folder
        self.config = config
        self._mark = data_mark(config, data).encode() if data else b""
        self.sources = part_sources(config, warns=True)
        self.changes: list[tuple[str, str, str]] = []
        self.hold = self._claim(resume)
        try:
            self._open_log()
        except OSError as error:
            self.hold.release()
            raise _unwritable(folder, error) from error
        self._tensorboard: TensorBoard | None = None
        self._summed = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "fedmpi-checkpoint")
        self._saving: Future[None] | None = None
        self.history = History(config, keeps=False, folder=folder)
        self.clients = ClientTable(folder)

    def _claim(self, resume: bool) -> Hold:
        """Lock the folder, which is empty or has this run if it is to be continued; write its first files."""
        try:
            make_folder(self.folder)
            hold = Hold(self.folder)
            try:
                found = self._compare(resume)
                if not found:
                    write_whole(self.folder / "config.toml", self._mark, config_toml(self.config).encode())
                keep_sources(self.folder, self.sources, resumed=found and has_trained(self.folder))
            except BaseException:
                hold.release()
                raise
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return hold

    def _compare(self, resume: bool) -> bool:
        """Return whether the folder has a run; reject it unless that is this run and is to be continued."""
        path = self.folder / "config.toml"
        found = [name for name in OF_A_RUN if (self.folder / name).exists()]
        found += [path.name for path in sorted(self.folder.glob("events.out.tfevents.*"))]
        if found and not path.exists():
            raise UserError(f"{self.folder} contains {found[0]} but no config.toml of its run. Choose another --out")
        if found and not resume:
            raise UserError(
                f"{self.folder} holds a run already ({', '.join(found)}). Add --resume to continue it (resume=True "
                "in Python), or choose another --out"
            )
        if found:
            self.changes = changes_since(path, self.config)
        return bool(found)

    def _open_log(self) -> None:
        self._handler = RunLog(self.folder / "run.log")
        self._handler.listen()
        if self.hold.before is not None:
            log.info("the run that held this folder has died (%s): taken over", self.hold.before)
        for sentence in not_repeatable(self.config):
            log.warning("%s", sentence)

    def resume(self, data: str = "") -> Checkpoint | None:
        """Return the newest checkpoint after removing the records after it; None if the run starts at round 0.

        Called once, before the first record is written.
        """
        with self._writing():
            checkpoint = newest_checkpoint(self.checkpoints)
            if checkpoint and checkpoint.header.get("data", "") != data:
                raise UserError(
                    f"{self.config.data.source.name} holds other data than those that {self.folder} was trained on up "
                    f"to round {checkpoint.next_round}. Prepare them as they were, or choose another --out"
                )
            kept, first, rows = [], 0, 0
            if checkpoint is None:
                self._begin_again()
            else:
                kept, first = self._records(checkpoint), checkpoint.next_round
                rows = checkpoint.header.get("client_rows", 0)
            self._take_changes(first)
            self.clients.resume(first, rows)
            write_whole(self.folder / "metrics.jsonl", *kept)
            self.history.rounds = len(kept)
            if self.config.logging.tensorboard:
                self._tensorboard = TensorBoard(self.folder, len(kept))
        if checkpoint:
            self.history.seconds_before = float(checkpoint.header["seconds"])
            log.info("resumed at round %d", checkpoint.next_round)
        return checkpoint

    def _take_changes(self, next_round: int) -> None:
        """Write changed settings to config.toml, and remove the final files of a run that gets more rounds."""
        if next_round > self.config.rounds:
            raise UserError(
                f"{self.folder} has done {next_round} rounds already, more than rounds = {self.config.rounds}. Give "
                f"rounds = {next_round} or more, or choose another --out"
            )
        if next_round < self.config.rounds:
            for name in FINAL:  # a summary implies a final model
                (self.folder / name).unlink(missing_ok=True)
        if self.changes:
            write_whole(self.folder / "config.toml", self._mark, config_toml(self.config).encode())
        for key, old, new in self.changes:
            log.info("changed before round %d: %s: %s -> %s", next_round, key, old, new)

    def _begin_again(self) -> None:
        """Warn that records without a checkpoint are dropped; reject a finished run."""
        if (self.folder / "summary.json").exists():
            raise UserError(f"{self.folder} holds a finished run and no checkpoint to resume. Choose another --out")
        path = self.folder / "metrics.jsonl"
        if path.exists() and (count := len(path.read_bytes().splitlines())):
            log.warning("no checkpoint yet in %s: begins again at round 0, %d records are dropped", self.folder, count)

    def _records(self, checkpoint: Checkpoint) -> list[bytes]:
        """Return the lines of metrics.jsonl that a checkpoint counts on."""
        path, settled = self.folder / "metrics.jsonl", checkpoint.header["settled"]
        kept = path.read_bytes().splitlines(keepends=True)[:settled] if path.exists() else []
        self._summed.update(b"".join(kept))
        if len(kept) < settled:
            raise UserError(
                f"{path} has {len(kept)} records, but the checkpoint counts on {settled}. Put the file back, or choose "
                "another --out"
            )
        if checkpoint.header.get("records") != self._summed.hexdigest():
            raise UserError(
                f"{path} differs from what was written up to round {checkpoint.next_round}. Put the file back, or "
                "choose another --out"
            )
        return kept

    def write(self, record: Record) -> None:
        """Append one round's record to metrics.jsonl and TensorBoard."""
        if self._saving is not None and self._saving.done():
            self.saved()  # raises its error
        with self._writing():
            line = as_line(record)
            with open(self.folder / "metrics.jsonl", "ab") as file:
                file.write(line)
            self._summed.update(line)
            self.history.add(record)
            if self._tensorboard is not None:
                self._tensorboard.record(record)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    def checkpoint(self, next_round: int, tensors: dict[str, Tensor], header: Record) -> None:
        """Save a checkpoint from which the run resumes at `next_round`.

        The present values are copied and written during the following rounds; the next call raises an error of that.
        """
        self.saved()
        counted: Record = {"seconds": self.history.seconds, "records": self._summed.hexdigest()}
        counted |= {"client_rows": self.clients.rows} if self.clients.rows else {}
        checkpoint = copied(next_round, tensors, {**header, **counted})
        seen = self.clients.take()

        def save() -> None:
            with self._writing():
                self._sync()
                self.clients.write(seen, next_round)
                save_checkpoint(self.checkpoints, checkpoint, self.config.checkpoint.keep)

        self._saving = self._thread.submit(save)

    def saved(self) -> None:
        """Wait until the last checkpoint is on the disk, and raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def finish(self, model: nn.Module, facts: Record, confusion: Confusion | None = None) -> Record:
        """Write the final model, its confusion matrix if known, and the summary; return the summary."""
        self.saved()
        with self._writing():
            self.clients.write(self.clients.take(), self.history.rounds + 1)
            write_whole(self.folder / "model.safetensors", model_file(model))
            for name, content in (confusion.files() if confusion is not None else {}).items():
                write_whole(self.folder / name, content)
            kept = {"plugins": digests(self.sources)} if self.sources else {}
            summary = self.history.summary(facts | kept)
            write_whole(self.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        return summary

    def failed(self, error: Exception) -> None:
        """Log the error that ends the run."""
        self._handler.failed(error)

    def close(self) -> None:
        """Wait for the last checkpoint; close the log and the events."""
        try:
            try:
                self.saved()
            except RunFailure as failure:  # the run has already ended with another failure
                log.warning("%s", failure)
            with writing(self.folder):
                if self._tensorboard is not None:
                    self._tensorboard.close()
        finally:
            self._thread.shutdown(wait=False)
            self._handler.leave()
            with suppress(OSError):
                self._handler.close()
            self.hold.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Check the lock, and report failed writes within the context in one sentence."""
        with writing(self.folder):
            self.hold.check()
            try:
                yield
            except FileNotFoundError:  # it has vanished since
                self.hold.check()
                raise

    def _sync(self) -> None:
        """Write the records to the disk, because a checkpoint counts on them."""
        with open(self.folder / "metrics.jsonl", "a") as file:
            os.fsync(file.fileno())
        sync_folder(self.folder)
        if self._tensorboard is not None:
            self._tensorboard.flush()


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run folder {folder} ({error.strerror or error}). {remedy(error)}, or choose another --out"
    )


def open_recorder(
    cluster: Cluster,
    folder: Path | None,
    config: Config,
    resume: bool,
    model: nn.Module | None = None,
    data: str = "",
) -> Recorder | None:
    """Return the recorder on rank 0, None on other ranks or without a folder.

    All ranks together reject an unusable folder, and a `model` that could not be saved at the end.
    """
    made: list[Recorder] = []

    def opened() -> Recorder | None:
        if folder is None:
            return None
        if model is not None:
            model_file(model)
        made.append(Recorder(folder, config, resume, data))
        return made[0]

    try:
        return on_server(cluster, opened)
    except BaseException:
        for recorder in made:  # another rank has died
            recorder.close()
        raise
