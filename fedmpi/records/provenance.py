"""Provenance of a run: versions, sources of custom components, shards, and settings changed when it was resumed.

A run may change its length, its logging and where it is computed. Any other difference from the folder's config.toml is
rejected. Changes are noted in run.log. Shards are identified by their checksum, components by the
sources in the run folder.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import numpy as np

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, read_plain, write_whole
from fedmpi.common.imports import NOT_THEIRS
from fedmpi.common.registry import Component
from fedmpi.config import Config
from fedmpi.config.keys import components_of
from fedmpi.config.loading import dotted, read_toml
from fedmpi.config.writing import differences

log = logging.getLogger("fedmpi")
PACKAGES = {"site-packages", "dist-packages"}
"""Names of folders for installed packages."""
FOLDER = "plugins"
"""Folder of the copied sources in a run folder."""
CONFIGURATION, SHARDS = "config.toml", "data.source"
SUM = ".sha256"
"""End of the names of files in RUN/plugins that contain the SHA-256 of a component's input file."""
MARK = "# data.source has the sha256 "
"""Start of the first line of config.toml if the data are a folder of shards."""
MAY_CHANGE = ("rounds", "data.verify", "evaluation.", "checkpoint.", "cluster.", "logging.")
MUST_STAY = ("logging.diagnostics", "evaluation.clients", "evaluation.fine_tune")
"""Exceptions from `MAY_CHANGE`: they count from round 0 on, or add columns to the table of clients."""


# --- versions ---


def versions(mpi: str) -> dict[str, str]:
    """Return the versions of fedmpi, Python, torch, NumPy and the MPI library (as the cluster names it)."""
    import torch  # loading it takes seconds, and light commands need no version

    return {
        "fedmpi": fedmpi.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "mpi": mpi,
    }


@cache
def git_commit() -> str | None:
    """Return the commit of the checkout that fedmpi runs from; None for an installed copy, or without git."""
    folder = Path(fedmpi.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


# --- sources of custom components ---


def custom_components(config: Config) -> list[Component]:
    """Return the custom components in the configuration."""
    return [one for _, one in components_of(config) if one.is_component and one.foreign]


def part_sources(config: Config, warns: bool = False) -> dict[str, bytes]:
    """Return the sources of components by file name: custom modules, and the user's modules that these import.

    An input file, which a component names in its option `file`, is represented by its SHA-256.
    """
    sources: dict[str, bytes] = {}
    for key, one in components_of(config):
        if "file" in one.given and os.path.isfile(one.given["file"]):
            with open(one.given["file"], "rb") as stream:
                sources[f"{key}.file{SUM}"] = hashlib.file_digest(stream, "sha256").hexdigest().encode()
    for component in custom_components(config):
        for name, path in _reached(component.object).items():
            depth = name.count(".") + 1 + (path.name == "__init__.py")
            sources["/".join(path.parts[-depth:])] = path.read_bytes()
        if warns and component.source is None:
            log.warning("%s = %s is in no file that could be stored with the run", component.key, component.name)
    return sources


def digests(sources: dict[str, bytes]) -> dict[str, str]:
    """Return SHA-256 by file name."""
    return {
        name: content.decode() if name.endswith(SUM) else hashlib.sha256(content).hexdigest()
        for name, content in sorted(sources.items())
    }


def kept_digests(run: Path) -> dict[str, str]:
    """Return SHA-256 by file name of the copies in RUN/plugins."""
    folder = run / FOLDER
    files = [*folder.rglob("*.py"), *folder.rglob(f"*{SUM}")]
    return digests({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})


def keep_sources(run: Path, sources: dict[str, bytes], resumed: bool) -> None:
    """Copy the sources into RUN/plugins, or compare them with the copies of a run that resumes."""
    folder = run / FOLDER
    if resumed:
        kept = kept_digests(run)
        for name, digest in digests(sources).items():
            if kept.get(name) != digest:
                raise UserError(
                    f"{name.removesuffix(SUM)} differs from the file that this run started with"
                    f"{'' if name.endswith(SUM) else f', {folder / name}'}. Restore that file, or choose another --out"
                )
        return
    shutil.rmtree(folder, ignore_errors=True)  # left by an earlier start
    for name, content in sources.items():
        make_folder((folder / name).parent)
        write_whole(folder / name, content)


@contextmanager
def sources_of(given: Any) -> Iterator[None]:
    """Import modules with a copy in the folder of a run's config.toml from there within the context.

    Nothing changes if all of them are imported already, from files equal to the copies.
    """
    path = Path(given) if isinstance(given, str | Path) else Path()
    folder = path.parent.resolve() / FOLDER
    copies = [*folder.rglob("*.py")] if path.name == CONFIGURATION else []
    kept = {".".join(copy.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): copy for copy in copies}
    files = {name: _own_file(name) if name in sys.modules else None for name in kept}
    if all(file is not None and file.read_bytes() == kept[name].read_bytes() for name, file in files.items()):
        yield
        return
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    others = {name: sys.modules.pop(name) for name in kept if name in sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in kept:
            sys.modules.pop(name, None)
        sys.modules.update(others)
        sys.dont_write_bytecode = writes


def _reached(written: Any) -> dict[str, Path]:
    """Return files by module name: the component's module, its packages, and the user's modules that they import."""
    waiting, found = [getattr(written, "__module__", type(written).__module__)], {}
    while waiting:
        name = waiting.pop()
        path = _own_file(name) if name and name not in found else None
        if path is None:
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += [*_imported(path, package), name.rpartition(".")[0]]
    return found


def _imported(path: Path, package: str) -> list[str]:
    """Return what import statements of a file may name: modules, and names in modules."""
    names = []
    with suppress(SyntaxError, ValueError, ImportError):  # changed since it was imported
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                whole = resolve_name("." * node.level + (node.module or ""), package)
                names += [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
    return names


def _own_file(name: str) -> Path | None:
    """Return the source file of a user's module: that of the imported one, or the first on sys.path."""
    if name in sys.modules:
        given = [getattr(sys.modules[name], "__file__", None) or ""]
    else:
        way = name.replace(".", "/") or "-"
        given = [f"{folder}/{end}" for folder in [*sys.path, "."] for end in (f"{way}/__init__.py", f"{way}.py")]
    path = next((Path(file).resolve() for file in given if file.endswith(".py") and os.path.isfile(file)), None)
    if path is None or PACKAGES & set(path.parts) or any(path.is_relative_to(folder) for folder in NOT_THEIRS):
        return None
    return path


# --- shards ---


def data_mark(config: Config, digest: str) -> str:
    """Return the first line of config.toml; "" for data that are not in a folder."""
    return f"{MARK}{digest}\n" if digest_of(config.data.source.choice) == digest else ""


def recorded_digest(run: Path) -> str | None:
    """Return the checksum of a run's shards; None if its config.toml has none."""
    try:
        first = read_plain(run / CONFIGURATION).partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return None
    return first.removeprefix(MARK).strip() if first.startswith(MARK) else None


def digest_of(shards: Any) -> str | None:
    """Return the checksum of a folder of shards; None if there is no such folder."""
    from fedmpi.data.schema import read_manifest  # types that take 10 ms to import, for many commands in vain

    try:
        return read_manifest(Path(shards)).digest if isinstance(shards, str | Path) else None
    except UserError:
        return None


def refuse_other_shards(path: Path, config: Config) -> None:
    """Reject a run's config.toml if the folder of its shards now holds other data, or is gone."""
    digest, shards = recorded_digest(path.parent), config.data.source.name
    if path.name != CONFIGURATION or digest is None or dotted(read_toml(path)).get(SHARDS) != shards:
        return
    if (present := digest_of(shards)) != digest:
        there = "holds other data than" if present else "is not a folder with the data that"
        raise UserError(
            f"{SHARDS} = {shards!r} {there} {path.parent} was trained on. Give the folder of the shards with the "
            f"checksum {digest[:12]}…, --set {SHARDS}=FOLDER"
        )


# --- settings changed by a resumed run ---


def changes_since(path: Path, config: Config) -> list[tuple[str, str, str]]:
    """Return key, old and new value of the differences from config.toml; reject those that a run cannot change."""
    try:
        differing = differences(tomllib.loads(read_plain(path).decode("utf-8")), config)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}). Choose another --out") from None
    refused = []
    for key, there, here in differing:
        same = key == SHARDS and recorded_digest(path.parent) == digest_of(config.data.source.choice) is not None
        on_rounds = key == "rounds" and config.local.schedule.name == "cosine"  # all learning rates depend on it
        if not same and (key in MUST_STAY or on_rounds or not key.startswith(MAY_CHANGE)):
            refused.append(f"{key}: {there} there, {here} here")
    if refused:
        raise UserError(
            f"{path} differs from the configuration given in what a run cannot change ({'; '.join(refused)}). Resume "
            "with the same, or choose another --out"
        )
    return differing
