"""Shards that a sweep needs: described in its file, and prepared once for all runs.

A preparation locks its folder; other sweeps that need the same shards wait for it.
"""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.files import FolderInUse
from fedmpi.data.schema import MANIFEST, PREPARING, read_manifest

WHERE_FROM = ("--out", "--raw", "--download", "--overwrite")
"""Options that change nothing about the shards themselves."""


@dataclass(frozen=True)
class Preparation:
    """One folder of shards, and the command that writes it."""

    folder: Path
    words: tuple[str, ...]  # Arguments of `fedmpi prepare`, without --out

    @property
    def command(self) -> list[str]:
        """All words of `fedmpi prepare`."""
        return [*self.words, "--out", str(self.folder)]

    def ready(self) -> bool:
        """Check whether the shards are complete; reject others in their folder."""
        if not (self.folder / MANIFEST).exists() or (self.folder / PREPARING).exists():
            return False
        there = shlex.split(read_manifest(self.folder).command)[3:]
        if sorted(_essential(there)) != sorted(_essential(self.words)):
            raise UserError(
                f"{self.folder} has shards with other options ({shlex.join(there)}). Choose another --out, or remove "
                "that folder"
            )
        return True

    def check(self) -> None:
        """Reject errors that can be found before any data are read."""
        if not self.ready():
            self._prepare("--dry-run")

    def ensure(self, say: Callable[[str], None], stop: Callable[[], bool]) -> bool:
        """Prepare the shards unless they are complete, or wait for another process that does; False if stopped."""
        started, waiting = time.monotonic(), False
        while not self.ready():
            if stop():
                return False
            if not waiting:
                say(f"{self.folder.name}: preparing {self.folder}")
            try:
                if self._prepare():
                    say(f"{self.folder.name}: prepared in {time.monotonic() - started:.0f} s")
            except FolderInUse:
                if not waiting:
                    say(f"{self.folder.name}: waiting for another process that prepares its shards")
                waiting = True
        return True

    def _prepare(self, *further: str) -> bool:
        """Run `fedmpi prepare`; return False if another process has completed the shards in the meantime."""
        from data_prep.__main__ import run as data_prep  # slow, and only for sweeps that prepare

        try:
            with redirect_stdout(io.StringIO()):
                code = data_prep([*self.command, *further])
        except UserError as error:
            if self.ready():
                return False
            raise type(error)(f"[prepare] for {self.folder.name}: {error}") from error
        if code:
            raise KeyboardInterrupt
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


def _essential(words: Sequence[str]) -> list[str]:
    """Return the words of a `fedmpi prepare` without the options that change nothing about the shards."""
    found, kept = [], True
    for word in words:
        if word.startswith("--"):
            kept = word not in WHERE_FROM
        found += [word] if kept else []
    return found
