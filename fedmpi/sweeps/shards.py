"""Shards that a sweep needs: described in its file, and prepared once for all runs.

The process that prepares them locks a folder beside the shards; the others wait.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import MissingFiles, RunFailure, UserError
from fedmpi.common.files import make_folder
from fedmpi.data.schema import MANIFEST, PREPARING, read_manifest
from fedmpi.process.children import ends_with_parent, how_it_ended, last_words, this_fedmpi
from fedmpi.records.hold import Hold, owner_of

WHERE_FROM = ("--out", "--raw", "--download", "--overwrite", "--plot")
"""Options that change nothing about the shards themselves."""
POLLED = 0.5
"""Seconds between two looks at a preparation."""


class Stopped(Exception):
    """A signal ended a preparation."""


@dataclass(frozen=True)
class Preparation:
    """One folder of shards, and the command that writes it."""

    name: str  # The name in the sweep's file; "" for a single table [prepare]
    folder: Path
    words: tuple[str, ...]  # Arguments of `fedmpi prepare`, without --out

    @property
    def title(self) -> str:
        """Name of the shards, or that of the data set."""
        return self.name or self.words[0]

    @property
    def command(self) -> list[str]:
        """All words of `fedmpi prepare`."""
        return [*self.words, "--out", str(self.folder)]

    def check(self) -> None:
        """Reject errors that can be found before any data are read."""
        if self.ready():
            return
        from data_prep.__main__ import run as data_prep  # slow, and only for sweeps that prepare

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                data_prep([*self.command, "--dry-run"])
        except UserError as error:
            kind = MissingFiles if isinstance(error, MissingFiles) else UserError
            raise kind(f"[prepare] for {self.title}: {error}") from error

    def ready(self) -> bool:
        """Check whether the shards are complete; reject others in their folder."""
        if not (self.folder / MANIFEST).exists() or (self.folder / PREPARING).exists():
            return False
        there, here = _options(shlex.split(read_manifest(self.folder).command)[3:]), _options(self.words)
        for option in (*here, *there):
            if there.get(option) != here.get(option):
                other, own = (" ".join(one.get(option, ["not given"])) or "given" for one in (there, here))
                raise UserError(
                    f"{self.folder} has shards with other options ({option}: {other}, but the sweep sets {own}). "
                    "Choose another --out, or remove that folder"
                )
        return True


def prepare_words(options: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return a table of the sweep's file as words of `fedmpi prepare`."""
    for needed in ("dataset", "partition"):
        if needed not in options:
            raise UserError(f'{where} needs {needed} = "NAME" (`fedmpi prepare list` shows them)')
    words = [str(options["dataset"])]
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            if key != "dataset" and one is not False:
                words += [flag] if one is True else [flag, str(one)]
    return tuple(words)


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of a command line of `fedmpi prepare` that change the shards, each with its values."""
    found: dict[str, list[str]] = {}
    option = "data set"
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            found.setdefault(option, []).extend([value] if value else [])
        else:
            found.setdefault(option, []).append(word)
    return {option: values for option, values in found.items() if option not in WHERE_FROM}


def ensure_shards(wanted: Preparation, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Prepare the shards unless they are complete, or wait for another process that does."""
    beside = wanted.folder.with_name(f".{wanted.folder.name}.preparing")
    waited = False
    while not wanted.ready():
        if stop():
            raise Stopped
        if beside.is_dir() and (owner := owner_of(beside)) is not None:
            if not waited:
                say(f"{wanted.title}: waiting for its shards, which {owner} prepares")
            waited = True
            time.sleep(POLLED)
            continue
        try:
            make_folder(beside)
            hold = Hold(beside)
        except OSError as error:
            raise UserError(f"cannot write {wanted.folder.parent} ({error.strerror}). Choose another --out") from error
        except UserError:  # another process was quicker
            continue
        try:
            if not wanted.ready():
                _prepare(wanted, beside / "output.log", say, stop)
        finally:
            hold.release()


def _prepare(wanted: Preparation, log: Path, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
    say(f"{wanted.title}: preparing {wanted.folder}")
    started = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*this_fedmpi(), "prepare", *wanted.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=ends_with_parent(at_once=True),
        )
        try:
            while process.poll() is None:
                if stop():
                    raise Stopped
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLLED)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    why = how_it_ended(process.returncode, last_words(log) or f"exit code {process.returncode}")
    if process.returncode == 2:
        raise UserError(f"[prepare] for {wanted.title}: {why}")
    if process.returncode:
        raise RunFailure(f"preparing {wanted.folder} failed ({why}): see {log}")
    say(f"{wanted.title}: prepared in {time.monotonic() - started:.0f} s")
