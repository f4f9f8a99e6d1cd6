"""Resumed runs: settings that may change, and moved folders of shards and sources.

A run may change its length, its logging and where it is computed. Any other difference from the folder's config.toml is
rejected. Changes are noted at the head of config.toml. Shards are identified by their checksum, components by the
sources in the run folder.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.common.registry import in_memory, is_digits
from fedmpi.config import Config, config_toml
from fedmpi.config.layers import dotted, read_toml
from fedmpi.config.loading import given_config
from fedmpi.config.writing import differences
from fedmpi.data.schema import MANIFEST, read_manifest
from fedmpi.records.provenance import FOLDER, kept_sources

CONFIGURATION, SHARDS = "config.toml", "data.source"
MARK = "# data.source has the sha256 "
"""Start of the first line of config.toml if the data are a folder of shards."""


def data_mark(config: Config, digest: str) -> str:
    """Return the first line of config.toml; "" for data that are not in a folder."""
    return f"{MARK}{digest}\n" if _is_folder(config.data.source.choice) else ""


def recorded_digest(run: Path) -> str | None:
    """Return the checksum of a run's shards; None if its config.toml has none."""
    try:
        first = read_plain(run / CONFIGURATION).partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return None
    return first.removeprefix(MARK).strip() if first.startswith(MARK) else None


def digest_of(shards: Any) -> str | None:
    """Return the checksum of a folder of shards; None if there is no such folder."""
    try:
        return read_manifest(Path(shards)).digest if _is_folder(shards) else None
    except UserError:
        return None


def find_shards(run: Path, shards: str) -> str | None:
    """Return the folder of a run's shards: as written, else beside the run or above it.

    The last names of the written path are searched in the run folder and in each folder above it.
    """
    digest = recorded_digest(run)
    if digest is None:
        return None
    parts = Path(shards).parts
    tails = [Path(*parts[place:]) for place in range(1 if Path(shards).is_absolute() else 0, len(parts))]
    places = (above / tail for above in run.resolve().parents for tail in tails)
    found = (place for place in chain([Path(shards)], places) if os.path.isfile(place / MANIFEST))
    return next((str(place) for place in found if digest_of(place) == digest), None)


def with_found_shards(path: Path, config: Config, strict: bool = True) -> Config:
    """Return the configuration of a run's config.toml, with its shards found if the folder was moved."""
    digest, shards = recorded_digest(path.parent), config.data.source.name
    if path.name != CONFIGURATION or digest is None or dotted(read_toml(path)).get(SHARDS) != shards:
        return config
    found = find_shards(path.parent, shards)
    if found is None and strict:
        there = "holds other data than" if digest_of(shards) else "is not a folder with the data that"
        raise UserError(
            f"{SHARDS} = {shards!r} {there} {path.parent} was trained on, and no folder beside that run is one. Give "
            f"the folder of the shards with the checksum {digest[:12]}…, --set {SHARDS}=FOLDER"
        )
    return config if found in (None, shards) else given_config(config, {SHARDS: found})


@contextmanager
def sources_of(given: Any) -> Iterator[None]:
    """Use the sources in the run folder for the components of its config.toml within the context."""
    path = Path(given) if isinstance(given, str | Path) else Path()
    if path.name != CONFIGURATION or not (path.parent / FOLDER).is_dir():
        yield
        return
    with kept_sources(path.parent):
        yield


def _is_folder(shards: Any) -> bool:
    return isinstance(shards, str | Path) and not is_digits(shards) and not in_memory(shards)


MAY_CHANGE = ("rounds", "data.verify", "evaluation.", "checkpoint.", "cluster.", "logging.")
NOT_WITH_THESE = {
    "logging.diagnostics": "it counts from round 0 on",
    "evaluation.clients": "it counts from round 0 on how often clients are used",
    "evaluation.fine_tune": "all rows about clients have the same columns",
}
COSINE = "with local.schedule = cosine all learning rates depend on it"
CHANGED = "# changed before round "


@dataclass(frozen=True)
class Changes:
    """Differences between a folder's config.toml and the configuration of the resumed run."""

    earlier: tuple[str, ...] = ()  # Notes of earlier changes
    keys: tuple[tuple[str, str, str], ...] = ()  # (key, old, new)

    def noted(self, round: int) -> tuple[str, ...]:
        """Return one note per change, earlier ones first; `round` is the first with the new values."""
        return (*self.earlier, *(f"{CHANGED}{round}: {key}: {old} -> {new}" for key, old, new in self.keys))

    def text(self, config: Config, round: int) -> bytes:
        """Return config.toml: the notes and the new configuration."""
        head = "".join(note + "\n" for note in self.noted(round))
        return (head + config_toml(config)).encode()


def changes_since(path: Path, config: Config) -> Changes:
    """Return the differences from the file config.toml; reject those that a run cannot change."""
    try:
        text = read_plain(path).decode("utf-8")
        differing = differences(tomllib.loads(text), config)
    except (OSError, ValueError, RecursionError) as error:  # no file, no TOML, no UTF-8, numbers of thousands of digits
        raise UserError(f"{path} is damaged ({error}): choose another --out") from None
    refused = []
    for key, there, here in differing:
        same = key == SHARDS and recorded_digest(path.parent) == digest_of(config.data.source.choice) is not None
        reason = None if same else _why_not(key, config)
        if reason is not None:
            refused.append(f"{key}: {there} there, {here} here{reason}")
    if refused:
        raise UserError(
            f"{path} differs from the configuration given in what a run cannot change ({'; '.join(refused)}): resume "
            "with the same, or choose another --out"
        )
    earlier = tuple(line for line in text.splitlines() if line.startswith(CHANGED))
    return Changes(earlier, tuple(differing))


def _why_not(key: str, config: Config) -> str | None:
    """Return None if a run may change the key; else the reason, "" if it is plain."""
    if key in NOT_WITH_THESE:
        return f" ({NOT_WITH_THESE[key]})"
    if key == "rounds" and config.local.schedule.name == "cosine":
        return f" ({COSINE})"
    return None if key.startswith(MAY_CHANGE) else ""
