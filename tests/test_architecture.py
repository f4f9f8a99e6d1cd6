"""The packages of fedmpi: imports lead to lower levels only, none are circular, and two libraries have one door each.

A module's imports are read from its source, those inside functions and those for type checkers included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from fedmpi.common.registry import KINDS

ROOT = Path(__file__).parents[1]

LEVELS = (
    ("common",),
    ("config",),
    ("mpi", "data", "models", "tasks", "updates"),
    ("aggregation", "clients", "describe", "local", "mediators", "privacy", "process", "records", "samples"),
    ("doctor", "core"),
    ("api",),
    ("jobs", "results", "sweeps", "testing"),
    ("report",),
    ("cli",),
    ("__main__",),
)
"""Packages by level, from the lowest. Packages of a level may use one another without circular imports."""
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}

DOORS = {"mpi4py": ("fedmpi.mpi",), "h5py": ("fedmpi.data", "data_prep")}
"""The only packages that may import a library."""

SHARED = {"fedmpi.data", "fedmpi.data.statistics", "fedmpi.data.schema"}
"""Modules that built-in components may import besides common, clients and their package: arithmetic, the data's
description."""

LOOKED_UP_FOR_OTHERS = "fedmpi.common.registry"
"""Module that imports components of all kinds by their names."""

BY_NAME = {"fedmpi.data.arrays": "data_prep.writer"}
"""`ClientArrays.save` hands its samples to the writer of shards."""

PART_OF_THE_ENGINES = {"fedmpi.local.optimizers"}
"""SGD and Adam are fused into the engines' own arithmetic."""


def package(module: str) -> str:
    """Return the folder, or the file, directly below fedmpi; "" for the package's own list of public names."""
    return [*module.split("."), ""][1]


def circular(uses: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the part of a graph that is left after nodes that use none of the others are removed again and again."""
    left = dict(uses)
    while free := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in free}
    return {name: used & left.keys() for name, used in left.items()}


def test_no_package_uses_one_above_it_and_none_use_one_another_in_a_circle() -> None:
    existing = {path.stem for path in (ROOT / "fedmpi").iterdir() if path.suffix in ("", ".py")}
    assert LEVEL.keys() <= existing
    below: dict[str, set[str]] = {name: set() for name in LEVEL}
    for name, path in sources().items():
        others = {used for used in uses(path) if used.startswith("fedmpi.") and package(used) != package(name)}
        if name.startswith("fedmpi.") and package(name):
            upward = {used for used in others if LEVEL[package(used)] > LEVEL[package(name)]}
            assert not upward, f"{name} imports {upward}"
            below[package(name)] |= {package(used) for used in others}
    assert not circular(below)


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports count in any package and anywhere in a file, except the package's list of public names,
    which imports them on first use."""
    own = {name: (set(uses(path)) & sources().keys()) - {name, "fedmpi"} for name, path in sources().items()}
    del own["fedmpi"]
    assert not circular(own)


def test_modules_that_are_named_in_texts_are_below_too() -> None:
    """An import by name at the time of use counts like any other."""
    for name, path in sources().items():
        if name != LOOKED_UP_FOR_OTHERS and name.startswith("fedmpi."):
            texts = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
            named = (texts & sources().keys()) - {"fedmpi", "data_prep", BY_NAME.get(name)}
            upward = {found for found in named if LEVEL.get(package(found), len(LEVELS)) > LEVEL[package(name)]}
            assert not upward, f"{name} names {upward}"


def test_the_package_itself_imports_nothing_at_once() -> None:
    body = tree(ROOT / "fedmpi" / "__init__.py").body
    at_once = [name for node in body if not isinstance(node, ast.If) for name in imported(node)]
    assert not [name for name in at_once if name.startswith("fedmpi")]


def test_libraries_have_one_door_each() -> None:
    for library, doors in DOORS.items():
        users = {name for name, path in sources().items() if library in {m.partition(".")[0] for m in uses(path)}}
        wrong = sorted(name for name in users if not name.startswith(tuple(f"{door}." for door in doors) + doors))
        assert users and not wrong, f"{library} is imported by {wrong}"


def test_built_in_components_import_nothing_that_runs_them() -> None:
    """Modules that a user's file can import and use alone: no configuration, no ranks, no engine, no round."""
    for kind in (kind for kind in KINDS.values() if not kind.key.startswith("--")):
        for module in set(kind.modules) - PART_OF_THE_ENGINES:
            reached = {
                name for name in all_below(module) if package(name) not in ("common", "clients", package(module))
            }
            assert reached <= SHARED, f"{module} leads to {reached - SHARED}"
            assert not [name for name in all_below(module) if name.endswith(("engines", "batched", "sequential"))]


def all_below(module: str, reached: frozenset[str] = frozenset()) -> frozenset[str]:
    """A module and every one that importing it imports, those for type checkers left out."""
    reached = reached | {module}
    for name in sorted(uses(sources()[module], typing=False)):
        if name in sources() and name != "fedmpi" and name not in reached:
            reached = all_below(name, reached)
    return reached


@cache
def sources() -> dict[str, Path]:
    """The files of fedmpi and data_prep by module."""
    paths = [path for package in ("fedmpi", "data_prep") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def uses(path: Path, typing: bool = True) -> frozenset[str]:
    """Every module that a file imports anywhere in it, with or without what only type checkers read."""
    parts = [
        node for node in tree(path).body if typing or "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", node))
    ]
    return frozenset(name for part in parts for node in ast.walk(part) for name in imported(node))


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        modules = [f"{node.module}.{name.name}" for name in node.names if f"{node.module}.{name.name}" in sources()]
        yield from modules
        if len(modules) < len(node.names):
            yield node.module
