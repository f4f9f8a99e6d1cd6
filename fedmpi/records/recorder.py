"""The folder of a run, written by rank 0 alone: configuration, records, summary, log, TensorBoard events, model.

Records are appended as one JSON line a round; every other file is written whole or not at all. What the folder is, its
config.toml says: only `--resume` goes on with a run, and only with the one that stands there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import make_folder, plain_or_absent, remedy, sync_folder, write_whole, writing
from fedmpi.config import Config, config_toml
from fedmpi.config.writing import not_repeatable
from fedmpi.mpi import Cluster
from fedmpi.mpi.ranks import on_server
from fedmpi.records import client_table
from fedmpi.records.changes import Changes, changes_since, data_mark
from fedmpi.records.checkpoint import Beside, Checkpoint, copied, model_file, newest_checkpoint, save_checkpoint
from fedmpi.records.confusion import CLASSES, CONFUSION, Confusion
from fedmpi.records.history import History, Record, as_line
from fedmpi.records.hold import Hold, refuse_held
from fedmpi.records.provenance import FOLDER, digests, has_trained, keep_sources, of_a_start, part_sources
from fedmpi.records.run_log import RunLog
from fedmpi.records.tensorboard import TensorBoard, check_folder

log = logging.getLogger("fedmpi")
WRITTEN = (
    "config.toml",
    "metrics.jsonl",
    "run.log",
    "summary.json",
    "model.safetensors",
    CONFUSION,
    CLASSES,
    client_table.FILE,
)
"""Files of a run that are written to, or replaced, while it lasts."""
OF_A_RUN = (*WRITTEN, "checkpoints", FOLDER)
"""What a run leaves in its folder, besides TensorBoard's events."""

FINAL = ("summary.json", "model.safetensors", CONFUSION, CLASSES)
"""What tells of the final model."""


class Recorder:
    """Writes a run's folder."""

    def __init__(self, folder: Path, config: Config, resume: bool, data: str = ""):
        self.folder = folder
        self.config = config
        self._mark = data_mark(config, data).encode() if data else b""
        if config.logging.tensorboard:
            check_folder(folder)
        self.sources = part_sources(config, warns=True)
        self.changes = Changes()
        self.hold = self._claim(resume)
        try:
            self._open_log()
        except OSError as error:
            self.hold.release()
            raise _unwritable(folder, error) from error
        self._tensorboard: TensorBoard | None = None
        self._summed = hashlib.sha256()
        self._beside = Beside()
        self.history = History(config, keeps=False)
        self.clients = client_table.ClientTable(folder)

    def _claim(self, resume: bool) -> Hold:
        """Make sure that the folder is empty, or holds this run and it is to be continued; and nobody else's now."""
        try:
            make_folder(self.folder)
            refuse_held(self.folder)
            self._compare(resume)
            hold = Hold(self.folder)
            try:
                found = self._compare(resume)  # others may have written before they let go of it
                keep_sources(self.folder, self.sources, resumed=found and has_trained(self.folder))
                if not found:
                    write_whole(self.folder / "config.toml", self._mark, config_toml(self.config).encode())
            except BaseException:
                hold.release()
                raise
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return hold

    def _compare(self, resume: bool) -> bool:
        """Whether the folder holds a run, which then is this one and to be continued."""
        path = self.folder / "config.toml"
        for name in WRITTEN:
            if not plain_or_absent(self.folder / name):
                raise UserError(f"{self.folder / name} is no plain file: remove it, or choose another --out")
        found = [name for name in OF_A_RUN if (self.folder / name).exists()]
        found += [path.name for path in sorted(self.folder.glob("events.out.tfevents.*"))]
        if found == [FOLDER] and of_a_start(self.folder, self.sources):
            return False
        if found and not path.exists():
            raise UserError(
                f"{self.folder} holds {found[0]} of a run but no config.toml that says which: choose another --out"
            )
        if found and not resume:
            raise UserError(
                f"{self.folder} holds a run already ({', '.join(found)}): add --resume to continue it (resume=True "
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
        """The newest checkpoint, with the records after it removed; None when the run starts at round 0.

        Called once, before the first record is written.
        """
        with self._writing():
            checkpoint = newest_checkpoint(self.checkpoints)
            if checkpoint and checkpoint.header.get("data", "") != data:
                raise UserError(
                    f"{self.config.data.source.name} holds other data than those that {self.folder} was trained on up "
                    f"to round {checkpoint.next_round}: prepare them as they were, or choose another --out"
                )
            if checkpoint is None:
                self._begin_again()
            kept = self._records(checkpoint.header["settled"] if checkpoint else 0)
            self._summed.update(b"".join(kept))
            if checkpoint and checkpoint.header.get("records") != self._summed.hexdigest():
                raise UserError(
                    f"{self.folder / 'metrics.jsonl'} differs from what was written up to round "
                    f"{checkpoint.next_round}: put the file back, or choose another --out"
                )
            self._take_changes(checkpoint.next_round if checkpoint else 0)
            self.clients.go_on(
                checkpoint.next_round if checkpoint else 0, checkpoint.header.get("client_rows", 0) if checkpoint else 0
            )
            write_whole(self.folder / "metrics.jsonl", *kept)
            for line in kept:
                self.history.add(json.loads(line))
            if self.config.logging.tensorboard:
                self._tensorboard = TensorBoard(self.folder, self.config, len(kept))
        if checkpoint:
            self.history.seconds_before = float(checkpoint.header["seconds"])
            log.info("resumed at round %d", checkpoint.next_round)
        return checkpoint

    def _take_changes(self, next_round: int) -> None:
        """Note what the run goes on with from here; of one that was finished, drop what said so."""
        if next_round > self.config.rounds:
            raise UserError(
                f"{self.folder} has done {next_round} rounds already, more than rounds = {self.config.rounds}: give "
                f"rounds = {next_round} or more, or choose another --out"
            )
        if next_round < self.config.rounds:
            for name in FINAL:  # the summary tells that there is a final model
                (self.folder / name).unlink(missing_ok=True)
        if self.changes.keys:
            write_whole(self.folder / "config.toml", self._mark, self.changes.text(self.config, next_round))
            for note in self.changes.noted(next_round)[len(self.changes.earlier) :]:
                log.info(note.removeprefix("# "))
        self.history.changes = [note.removeprefix("# ") for note in self.changes.noted(next_round)]

    def _begin_again(self) -> None:
        """Say that what a run left before its first checkpoint is dropped; a finished one is left alone."""
        if (self.folder / "summary.json").exists():
            raise UserError(f"{self.folder} holds a finished run and no checkpoint to go on from: choose another --out")
        path = self.folder / "metrics.jsonl"
        if path.exists() and (count := len(path.read_bytes().splitlines())):
            log.warning("no checkpoint yet in %s: begins again at round 0, %d records are dropped", self.folder, count)

    def _records(self, settled: int) -> list[bytes]:
        """The first `settled` lines of metrics.jsonl, each one record."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines[:settled] if line.endswith(b"\n")]
        for number, line in enumerate(kept):
            try:
                whole = json.loads(line)["round"] == number
            except (ValueError, TypeError, KeyError, RecursionError):
                whole = False
            if not whole:
                raise UserError(f"{path}, line {number + 1}, is not the record of round {number}: choose another --out")
        if len(kept) < settled:
            raise UserError(
                f"{path} holds {len(kept)} records where the checkpoint counts on {settled}: put the file back, or "
                "choose another --out"
            )
        return kept

    def write(self, record: Record) -> None:
        """Append one round's record to metrics.jsonl and TensorBoard."""
        self._beside.check()
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
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def checkpoint(self, next_round: int, tensors: dict[str, Tensor], header: Record) -> None:
        """Save a checkpoint from which the run goes on at `next_round`, after the records that it counts on.

        Its content is that of now. It is written beside the rounds that follow: what fails is raised by the next call.
        """
        checkpoint = copied(next_round, tensors, {**header, **self.counted()})
        seen = self.clients.take()

        def save() -> None:
            with self._writing():
                self._sync()
                self.clients.write(seen)
                save_checkpoint(self.checkpoints, checkpoint, self.config.checkpoint.keep)

        self._beside.start(save)

    def counted(self) -> Record:
        """What a checkpoint's header says of the records that it counts on, and the seconds until now."""
        rows = {"client_rows": self.clients.rows} if self.clients.rows else {}
        return {"seconds": self.history.seconds, "records": self._summed.hexdigest(), **rows}

    def note_clients(self, table: client_table.Columns) -> None:
        """Keep rows about single clients, to be written with the next checkpoint or at the end."""
        self.clients.add(table)

    def saved(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self._beside.wait()

    def finish(self, model: nn.Module, facts: Record, confusion: Confusion | None = None) -> Record:
        """Write the final model, whom it takes for whom where that is known, and the summary; returns the summary."""
        self.saved()
        with self._writing():
            self.clients.write(self.clients.take())
            write_whole(self.folder / "model.safetensors", model_file(model))
            for name, content in (confusion.files() if confusion is not None else {}).items():
                write_whole(self.folder / name, content)
            kept = {"plugins": digests(self.sources)} if self.sources else {}
            summary = self.history.summary(facts | kept)
            write_whole(self.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        return summary

    def failed(self, error: Exception) -> None:
        """Note what ends the run, before it is closed."""
        self._handler.failed(error)

    def close(self) -> None:
        """Flush and close the log and the events; a checkpoint that is being written is waited for."""
        try:
            try:
                self.saved()
            except RunFailure as failure:  # of a run that another failure has ended
                log.warning("%s", failure)
            with writing(self.folder):
                if self._tensorboard is not None:
                    self._tensorboard.close()
        finally:
            self._handler.leave()
            with suppress(OSError):
                self._handler.close()
            self.hold.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Within, the folder is this run's, and what cannot be written there is said in a sentence."""
        with writing(self.folder):
            self.hold.check()
            try:
                yield
            except FileNotFoundError:  # it has vanished since
                self.hold.check()
                raise

    def _sync(self) -> None:
        """Bring the records to the disk: a checkpoint counts on them."""
        with open(self.folder / "metrics.jsonl", "a") as file:
            os.fsync(file.fileno())
        sync_folder(self.folder)
        if self._tensorboard is not None:
            self._tensorboard.flush()


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write the run folder {folder} ({error.strerror or error}): {remedy(error)}, or choose another --out"
    )


def open_recorder(
    cluster: Cluster,
    folder: Path | None,
    config: Config,
    resume: bool,
    model: nn.Module | None = None,
    data: str = "",
) -> Recorder | None:
    """The recorder on rank 0, None on the others, and everywhere where rank 0 is given no folder.

    A folder that cannot be used, and a `model` that could not be saved in the end, are refused by all ranks together.
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
        for recorder in made:  # which nobody has heard of: another rank has died
            recorder.close()
        raise
