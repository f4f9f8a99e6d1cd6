"""A run's folder may be moved: its shards are known by their checksum, its components by the sources kept with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from fedmpi.common.data_choices import in_memory, is_digits
from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.config import Config
from fedmpi.config.base import written
from fedmpi.config.layers import dotted, read_toml
from fedmpi.config.loading import given_config
from fedmpi.data.schema import MANIFEST, read_manifest
from fedmpi.records.plugin_files import FOLDER, kept_sources

CONFIGURATION, SHARDS = "config.toml", "data.shards"
MARK = "# data.shards has the sha256 "
"""Begins the first line of a run's config.toml whose data are a folder of shards."""


def data_mark(config: Config, digest: str) -> str:
    """The first line of config.toml, "" for data that are not in a folder."""
    return f"{MARK}{digest}\n" if _is_folder(config.data.shards) else ""


def recorded_digest(run: Path) -> str | None:
    """The checksum of the shards that a run was trained on; None where its config.toml has none."""
    try:
        first = read_plain(run / CONFIGURATION).partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return None
    return first.removeprefix(MARK).strip() if first.startswith(MARK) else None


def digest_of(shards: Any) -> str | None:
    """The checksum of a folder of shards; None where there is no such folder."""
    try:
        return read_manifest(Path(shards)).digest if _is_folder(shards) else None
    except UserError:
        return None


def find_shards(run: Path, shards: str) -> str | None:
    """The folder with the shards that a run was trained on: as written, else beside the run or above it.

    The last names of the path as written are looked for in the run's folder and in each folder above it.
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
    """The configuration of a run's config.toml, its shards found wherever the run's folder is now."""
    digest, shards = recorded_digest(path.parent), written(config.data.shards)
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
    """Within, the components of a run's config.toml are those that are kept with it; nothing for other files."""
    path = Path(given) if isinstance(given, str | Path) else Path()
    if path.name != CONFIGURATION or not (path.parent / FOLDER).is_dir():
        yield
        return
    with kept_sources(path.parent):
        yield


def _is_folder(shards: Any) -> bool:
    return isinstance(shards, str | Path) and not is_digits(shards) and not in_memory(shards)
