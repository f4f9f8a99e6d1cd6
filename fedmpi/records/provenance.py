"""What a run was made with: versions, the commit of the source, and the source files of the user's own components.

A run's folder keeps copies of these files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import logging
import os
import platform
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
from fedmpi.common.data_choices import in_memory, is_digits
from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, partial_name, write_whole
from fedmpi.common.imported import load
from fedmpi.common.own_code import LAMBDA, as_written, found_by_name, own_text
from fedmpi.common.registry import KINDS, SOURCE, Component, resolve
from fedmpi.config import Config
from fedmpi.config.keys import components_of


def versions(mpi: str) -> dict[str, str]:
    """Versions of fedmpi, Python, torch, NumPy and the MPI library (as the cluster names it)."""
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
    """The commit of the checkout that fedmpi runs from; None for an installed copy, and where there is no git.

    Many runs of one process have the code that was loaded, and so one commit.
    """
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

LEFT_OUT = ("fedmpi", "__main__")
FOLDER = "plugins"
"""Of the copies in a run's folder."""


def foreign_choices(config: Config) -> list[tuple[str, Any]]:
    """Return (kind, choice) of every custom component in the configuration."""
    found = [chosen for _, chosen in components_of(config) if chosen.is_component]
    return [
        (one.kind, one.choice) for one in found if not isinstance(one.choice, str) or is_foreign(one.kind, one.choice)
    ]


def is_foreign(kind: str, choice: str) -> bool:
    """Check whether a name is that of a custom component; "digits:clients=50" and a folder are none."""
    return in_memory(choice) and not is_digits(choice) if kind == SOURCE else ":" in choice


def plugin_files(*choices: Any) -> dict[str, str]:
    """SHA-256 of every source file behind parts of the user's own, each named by its module.

    Counted are the modules themselves and all others that are loaded when they are, wherever they lie: those that they
    import. Installed packages, fedmpi and modules without a source file are left out.
    """
    foreign = [choice for choice in choices if not isinstance(choice, str) or ":" in choice]
    if not foreign:
        return {}
    reasons = {}
    for choice in foreign:
        try:
            if isinstance(choice, str):
                load(choice, choice)
        except UserError as error:
            reasons[choice] = str(error)
    if reasons:
        return reasons
    return {shown: _digest(path.read_bytes()) for shown, path in sorted(_loaded().items())}


def part_sources(config: Config, warns: bool = False) -> dict[str, bytes]:
    """The sources of the user's own parts by file name: their modules, and those of the user's that these import.

    A part that was typed in, where there is no file, is there as the text of its own; so is, beside the modules, a
    function that its name does not lead to, such as a lambda: of one file there may be many. The file of such a text
    has the key of the configuration in its name, since several keys may be given a lambda of one module.
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
        text = _text_alone(part)
        if text:
            sources[_file_alone(part, counts[kind])] = text.encode()
        elif warns:
            log.warning("%s = %s has no source that could be kept with the run", part.key, part.name)
    return sources


def _file_alone(part: Component, number: int) -> str:
    """The name of the file for the text of a part alone, the first, second, … of its key."""
    key = f"{part.key}.{number}" if KINDS[part.kind].several else part.key
    return f"{key}.{part.name.replace(':', '.').replace('<', '').replace('>', '')}.py"


def _text_alone(part: Component) -> str:
    """The text of a part's own lines, and which of several lambdas in them it is; "" where it cannot be had."""
    text = own_text(part.object)
    code = getattr(inspect.unwrap(as_written(part.object)), "__code__", None)
    if code is None or code.co_name != LAMBDA or text.count("lambda") < 2:
        return text
    first = code.co_firstlineno  # where what Python does before the body stands, at column 0
    places = [(line, column) for line, _, column, _ in code.co_positions() if line is not None and column is not None]
    body = min((place for place in places if place != (first, 0)), default=None)
    if body is None:
        raise UserError(
            f"{part.key} is given one of several lambdas in line {first} of {code.co_filename}, and Python was told to "
            "forget the columns of code, by which the run's folder tells them apart: write each in a line of its own"
        )
    return f"{text}# the lambda whose body begins in line {body[0] - first + 1}, column {body[1] + 1}\n"


def digests(sources: dict[str, bytes]) -> dict[str, str]:
    """File name → SHA-256."""
    return {name: _digest(content) for name, content in sorted(sources.items())}


def kept_digests(run: Path) -> dict[str, str]:
    """File name → SHA-256 of the copies in RUN/plugins."""
    folder = run / FOLDER
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py") if path.is_file()}
    return {name: _digest(path.read_bytes()) for name, path in sorted(found.items())}


@contextmanager
def kept_sources(run: Path) -> Iterator[None]:
    """Within, the modules of which RUN/plugins holds a copy are imported from there, unless they are the same files."""
    folder = run.resolve() / FOLDER
    kept = {module: digest for name, digest in kept_digests(run).items() if (module := _module_of(name))}
    if all(_digest_of_module(name) == digest for name, digest in kept.items()):
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
    """The module that is imported from a file of RUN/plugins; "" where it holds the text of one component."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts) if all(map(str.isidentifier, parts)) else ""


def _digest_of_module(name: str) -> str | None:
    """The SHA-256 of the file that a module is, or would be, imported from; None where there is none."""
    path = _own_file(name)
    return None if path is None else _digest(path.read_bytes())


def _file_on_path(name: str) -> str | None:
    """The source file of a module in the first folder that has one: of sys.path, or the working directory."""
    way = name.replace(".", "/")
    ends = (f"{folder or '.'}/{end}" for folder in [*sys.path, "."] for end in (f"{way}/__init__.py", f"{way}.py"))
    return next(filter(os.path.isfile, ends), None)


def has_trained(run: Path) -> bool:
    """Whether a run has a checkpoint or is finished. Any other one starts at round 0, whatever it recorded."""
    return (run / "summary.json").exists() or any((run / "checkpoints").glob("*"))


def keep_sources(run: Path, sources: dict[str, bytes], resumed: bool) -> None:
    """Copy the sources into RUN/plugins; of a run that continues, compare them with the copies."""
    folder = run / FOLDER
    if not sources:
        return
    if resumed:
        for name, content in sources.items():
            kept = folder / name
            if not kept.exists():
                raise UserError(
                    f"{folder} holds no copy of {_in_words(name)}, so that nothing tells whether this run was started "
                    "with the same: an older version of fedmpi kept none, or the part has come to use it since; start "
                    "the run anew, with another --out"
                )
            if kept.read_bytes() != content:
                raise UserError(
                    f"{name} is not the file that this run was started with (its copy is {kept}): put that one in its "
                    "place, or choose another --out"
                )
        return
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier start
    for name, content in sources.items():
        make_folder((folder / name).parent)
        write_whole(folder / name, content)


def _in_words(name: str) -> str:
    """What a copy is of, by the name of its file."""
    key = next((kind.key for kind in KINDS.values() if name.startswith(f"{kind.key}.")), None)
    return name if key is None else f"what {key} was given ({name})"


def of_a_start(run: Path, sources: dict[str, bytes]) -> bool:
    """Whether RUN/plugins holds such copies only, whole or half written: a start was killed before it said which run
    it is."""
    folder = run / FOLDER
    paths = [folder / name for name in sources]
    copies = {*paths, *(partial_name(path) for path in paths)}
    return bool(sources) and folder.is_dir() and all(path in copies for path in folder.rglob("*") if not path.is_dir())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _reached(part: Component) -> dict[str, Path]:
    """Module name → file of the part's module, the packages around it, and the user's modules that these import."""
    written = as_written(part.object)
    waiting, found = [getattr(written, "__module__", type(written).__module__)], {}
    while waiting:
        name = waiting.pop()
        path = _own_file(name, left_out=("fedmpi",)) if name not in found else None
        if path is None:
            continue
        found[name] = path
        above = name.rpartition(".")[0]
        package = getattr(sys.modules.get(name), "__package__", None) or above
        waiting += [*_imported(path, name if path.name == "__init__.py" else package), *([above] if above else [])]
    return found


def _imported(path: Path, package: str) -> list[str]:
    """What the import statements of a file may name: modules, and names that modules have."""
    names = []
    with suppress(SyntaxError, ValueError, ImportError):  # changed since it was imported
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                whole = resolve_name("." * node.level + (node.module or ""), package)
                names += [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
    return names


def _loaded() -> dict[str, Path]:
    """The source files of the loaded modules that are the user's own, named as they lie below a folder of sys.path."""
    found = {}
    for name in sys.modules.copy():
        path = _own_file(name, LEFT_OUT)
        if path is not None:
            found[_shown(name, path)] = path
    return found


def _own_file(name: str, left_out: tuple[str, ...] = ()) -> Path | None:
    """The source file of a module of the user's, whether or not it is imported yet."""
    given = getattr(sys.modules[name], "__file__", None) if name in sys.modules else _file_on_path(name)
    file = os.fspath(given) if isinstance(given, str | Path) else ""
    if name.partition(".")[0] in left_out or not file.endswith(".py") or _installed(file):
        return None
    path = Path(file).resolve()
    return path if path.is_file() else None


def _shown(name: str, path: Path) -> str:
    depth = name.count(".") + 1 + (path.name == "__init__.py")
    return "/".join(path.parts[-depth:])


@cache
def _installed(file: str) -> bool:
    """Whether the file lies, behind all links, among installed packages: asked of thousands of modules in every run."""
    path = Path(file).resolve()
    return any(part in PACKAGES for part in path.parts) or any(path.is_relative_to(folder) for folder in INSTALLED)
