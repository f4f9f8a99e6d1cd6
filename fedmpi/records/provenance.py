"""Provenance of a run: versions, the commit of the source, and copies of the sources of custom components."""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import numpy as np

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, write_whole
from fedmpi.common.imports import as_written, found_by_name, own_text
from fedmpi.common.registry import KINDS, SOURCE, Component, in_memory, is_digits, resolve
from fedmpi.config import Config
from fedmpi.config.keys import components_of


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


log = logging.getLogger("fedmpi")
INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
PACKAGES = ("site-packages", "dist-packages")
"""Names of folders for installed packages."""

FOLDER = "plugins"
"""Name of the folder with the copies in a run folder."""


def foreign_choices(config: Config) -> list[tuple[str, Any]]:
    """Return (kind, choice) of every custom component in the configuration."""
    found = [chosen for _, chosen in components_of(config) if chosen.is_component]
    return [
        (one.kind, one.choice) for one in found if not isinstance(one.choice, str) or is_foreign(one.kind, one.choice)
    ]


def is_foreign(kind: str, choice: str) -> bool:
    """Check whether a name is that of a custom component; "digits:clients=50" and a folder are none."""
    return in_memory(choice) and not is_digits(choice) if kind == SOURCE else ":" in choice


def part_sources(config: Config, warns: bool = False) -> dict[str, bytes]:
    """Return the sources of custom components by file name: their modules, and the user's modules that these import.

    A component without a module, such as a lambda or one that was typed in, is stored as its own text. The
    key of the configuration is in the name of that file, since several keys may be given a lambda of one module.
    """
    sources: dict[str, bytes] = {}
    counts: Counter[str] = Counter()
    for kind, choice in foreign_choices(config):
        part = resolve(kind, choice)
        counts[kind] += 1
        if part.source is not None:
            sources |= {_shown(name, path): path.read_bytes() for name, path in _reached(part).items()}
            if found_by_name(part.object):
                continue
        if text := own_text(part.object):
            key = f"{part.key}.{counts[kind]}" if KINDS[part.kind].several else part.key
            sources[f"{key}.{re.sub('[<>]', '', part.name.replace(':', '.'))}.py"] = text.encode()
        elif warns:
            log.warning("%s = %s has no source that could be stored with the run", part.key, part.name)
    return sources


def digests(sources: dict[str, bytes]) -> dict[str, str]:
    """Return SHA-256 by file name."""
    return {name: _digest(content) for name, content in sorted(sources.items())}


def kept_digests(run: Path) -> dict[str, str]:
    """Return SHA-256 by file name of the copies in RUN/plugins."""
    folder = run / FOLDER
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
    return {name: _digest(path.read_bytes()) for name, path in sorted(found.items())}


@contextmanager
def kept_sources(run: Path) -> Iterator[None]:
    """Within the context, modules with a copy in RUN/plugins are imported from there, unless the files are equal."""
    folder = run.resolve() / FOLDER
    kept = {module: digest for name, digest in kept_digests(run).items() if (module := _module_of(name))}
    current = {name: _own_file(name) for name in kept}
    if all(path is not None and _digest(path.read_bytes()) == kept[name] for name, path in current.items()):
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


def _module_of(file: str) -> str:
    """Return the module of a file in RUN/plugins; "" if the file has the text of one component."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts) if all(map(str.isidentifier, parts)) else ""


def _file_on_path(name: str) -> str | None:
    """Return the source file of a module in the first folder of sys.path, or in the working directory."""
    way = name.replace(".", "/")
    ends = (f"{folder or '.'}/{end}" for folder in [*sys.path, "."] for end in (f"{way}/__init__.py", f"{way}.py"))
    return next(filter(os.path.isfile, ends), None)


def has_trained(run: Path) -> bool:
    """Check whether a run has a checkpoint or is finished. Any other one starts at round 0."""
    return (run / "summary.json").exists() or any((run / "checkpoints").glob("*"))


def keep_sources(run: Path, sources: dict[str, bytes], resumed: bool) -> None:
    """Copy the sources into RUN/plugins, or compare them with the copies of a run that resumes."""
    folder = run / FOLDER
    if not sources:
        return
    if resumed:
        for name, content in sources.items():
            kept = folder / name
            if not kept.exists():
                raise UserError(
                    f"{folder} has no copy of {name}, so the run may have started with other code. Start it again with "
                    "another --out"
                )
            if kept.read_bytes() != content:
                raise UserError(
                    f"{name} differs from the file that this run started with, {kept}. Restore that file, or choose "
                    "another --out"
                )
        return
    shutil.rmtree(folder, ignore_errors=True)  # left by an earlier start
    for name, content in sources.items():
        make_folder((folder / name).parent)
        write_whole(folder / name, content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _reached(part: Component) -> dict[str, Path]:
    """Return files by module name: the component's module, its packages, and the user's modules that they import."""
    written = as_written(part.object)
    waiting, found = [getattr(written, "__module__", type(written).__module__)], {}
    while waiting:
        name = waiting.pop()
        path = _own_file(name) if name not in found else None
        if path is None:
            continue
        found[name] = path
        above = name.rpartition(".")[0]
        package = getattr(sys.modules.get(name), "__package__", None) or above
        waiting += [*_imported(path, name if path.name == "__init__.py" else package), *([above] if above else [])]
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
    """Return the source file of a user's module, imported or not."""
    given = getattr(sys.modules[name], "__file__", None) if name in sys.modules else _file_on_path(name)
    file = os.fspath(given) if isinstance(given, str | Path) else ""
    if name.partition(".")[0] == "fedmpi" or not file.endswith(".py") or _installed(file):
        return None
    path = Path(file).resolve()
    return path if path.is_file() else None


def _shown(name: str, path: Path) -> str:
    depth = name.count(".") + 1 + (path.name == "__init__.py")
    return "/".join(path.parts[-depth:])


@cache
def _installed(file: str) -> bool:
    """Check whether the file, with links resolved, belongs to an installed package."""
    path = Path(file).resolve()
    return any(part in PACKAGES for part in path.parts) or any(path.is_relative_to(folder) for folder in INSTALLED)
