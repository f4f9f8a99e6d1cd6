"""The source files of the user's own parts: their digests, and the copies that a run's folder keeps of them."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import sys
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedmpi.common.data_choices import in_memory, is_digits
from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, partial_name, write_whole
from fedmpi.common.imported import load
from fedmpi.common.made_with import found_by_name
from fedmpi.common.object_names import LAMBDA, as_written, own_text
from fedmpi.common.registry import KINDS, Part, resolve
from fedmpi.config import Config

log = logging.getLogger("fedmpi")
INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
PACKAGES = ("site-packages", "dist-packages")
"""Names of folders for installed packages."""

LEFT_OUT = ("fedmpi", "__main__")
FOLDER = "plugins"
"""Of the copies in a run's folder."""


def foreign_choices(config: Config) -> list[tuple[str, Any]]:
    """(kind, choice) of everything in the configuration that is not fedmpi's own."""
    found = []
    for kind in KINDS.values():
        table, _, key = kind.key.partition(".")
        value = getattr(getattr(config, table, None), key, None)
        for choice in value if isinstance(value, tuple | list) else [value]:
            named = isinstance(choice, str) and _is_foreign(kind.name, choice)
            if named or (callable(choice) and not isinstance(choice, str)):
                found.append((kind.name, choice))
    return found


def _is_foreign(kind: str, choice: str) -> bool:
    """Whether a name is that of the user's own part: "digits:clients=50" and a folder are none."""
    return in_memory(choice) and not is_digits(choice) if kind == "data source" else ":" in choice


def plugin_files(*choices: Any) -> dict[str, str]:
    """SHA-256 of every source file behind parts of the user's own, each named by its module.

    Counted are the modules themselves and all others that are loaded when they are, wherever they lie: those that they
    import. Installed packages, fedmpi and modules without a source file are left out.

    Parameters
    ----------
    *choices : str or function or class
        What was chosen; built-in names have no files of their own.

    Returns
    -------
    dict
        Empty for built-in parts. A module that cannot be imported gives the reason in the place of a digest.
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

    Parameters
    ----------
    config : Config
    warns : bool
        Whether the log shall tell of parts without a source.

    Raises
    ------
    UserError
        Which of the lambdas on a line was given cannot be told.
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


def _file_alone(part: Part, number: int) -> str:
    """The name of the file for the text of a part alone, the first, second, … of its key."""
    key = f"{part.key}.{number}" if KINDS[part.kind].several else part.key
    return f"{key}.{part.name.replace(':', '.').replace('<', '').replace('>', '')}.py"


def _text_alone(part: Part) -> str:
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


def keep_sources(run: Path, sources: dict[str, bytes], resumed: bool) -> None:
    """Copy the sources into RUN/plugins; of a run that goes on, compare them with the copies.

    Raises
    ------
    UserError
        When a file is another one than the run was started with, or no copy tells.
    """
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


def _reached(part: Part) -> dict[str, Path]:
    """Module name → file of the part's module and of the user's modules whose names it uses, and theirs."""
    written = as_written(part.object)
    waiting, found = [getattr(written, "__module__", type(written).__module__)], {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        path = _own_file(name, module, left_out=("fedmpi",))
        if name in found or module is None or path is None:
            continue
        found[name] = path
        for value in list(vars(module).values()):
            used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(used, str):
                waiting.append(used)
    return found


def _loaded() -> dict[str, Path]:
    """The source files of the loaded modules that are the user's own, named as they lie below a folder of sys.path."""
    found = {}
    for name, module in sys.modules.copy().items():
        path = _own_file(name, module, LEFT_OUT)
        if path is not None:
            found[_shown(name, path)] = path
    return found


def _own_file(name: str, module: ModuleType | None, left_out: tuple[str, ...]) -> Path | None:
    given = getattr(module, "__file__", None)
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
