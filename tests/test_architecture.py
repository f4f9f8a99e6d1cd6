"""The packages of fedmpi: imports lead to lower levels only, none are circular, and only one package may import each
of three libraries.

A module's imports are read from its source, those inside functions and those for type checkers included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import fedmpi
from fedmpi.common.registry import KINDS

ROOT = Path(__file__).parents[1]

FLOORS = (
    ("common",),
    ("config",),
    ("mpi", "data", "models", "tasks", "updates"),
    ("aggregation", "clients", "describe", "local", "mediators", "privacy", "process", "records", "samples"),
    ("doctor", "jobs", "core"),
    ("api",),
    ("results", "sweeps", "testing"),
    ("report",),
    ("cli",),
    ("__main__",),
)
"""Packages by level, from the lowest. Packages of a level may use one another without circular imports."""

DOORS = {"mpi4py": ("fedmpi.mpi",), "h5py": ("fedmpi.data", "data_prep")}
"""The only packages that may import a library."""


TWICE = {"Adam", "Strata", "stratified", "uniform"}
"""Classes and functions of one name in two modules: optimizers of clients and of the server, draws and weights."""

SHARED = {"fedmpi.data", "fedmpi.data.statistics", "fedmpi.data.schema"}
"""Packages that built-in components may import beside common, cohorts, and the one that they are in: arithmetic, the
data's description."""

LOOKED_UP_FOR_OTHERS = {"fedmpi.common.registry"}
"""Modules that import components of all kinds by their names."""

BY_NAME = {"fedmpi.data.arrays": "data_prep.writer"}
"""`ClientArrays.save` hands its samples to the writer of shards."""

PART_OF_THE_ENGINES = {"fedmpi.local.optimizers"}
"""SGD and Adam are fused into the engines' own arithmetic."""

METAPHORS = {"told", "heard", "foretold", "untold", "look_away", "there_and_back"}
"""Words that no name contains, whole or between underscores and capitals: a name is a common noun for the value."""


@dataclass(frozen=True)
class Arrow:
    """`importer` uses `module`."""

    importer: str
    module: str

    @property
    def rooms(self) -> tuple[str, str]:
        return room(self.importer), room(self.module)


def room(module: str) -> str:
    """The folder, or the file, directly below fedmpi; "" for the package's own list of public names."""
    return [*module.split("."), ""][1]


def test_no_room_uses_one_above_it() -> None:
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    used = {name for arrow in arrows() for name in arrow.rooms} - {""}
    assert used <= floor.keys(), f"on no floor: {used - floor.keys()}"
    upward = [arrow for arrow in between_rooms() if floor[arrow.rooms[0]] < floor[arrow.rooms[1]]]
    assert not upward, listed(upward)


def test_no_rooms_use_one_another_in_a_circle() -> None:
    below: dict[str, set[str]] = {}
    for arrow in between_rooms():
        below.setdefault(arrow.rooms[0], set()).add(arrow.rooms[1])
    left = set(below)
    while free := {name for name in left if not below[name] & left}:
        left -= free
    circling = [arrow for arrow in between_rooms() if set(arrow.rooms) <= left]
    assert not left, listed(circling)


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports count in any package and anywhere in a file, except the package's list of public names,
    which imports them on first use."""
    left = {name: {module for module in uses(path) if module in sources()} for name, path in sources().items()}
    left = {name: used - {name, "fedmpi"} for name, used in left.items() if name != "fedmpi"}
    while free := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in free}
    assert not left, "\n".join(f"{name} imports {', '.join(used & left.keys())}" for name, used in left.items())


def test_modules_that_are_named_in_texts_are_below_too() -> None:
    """An import by name at the time of use counts like any other."""
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    for name, path in sources().items():
        if name in LOOKED_UP_FOR_OTHERS or not name.startswith("fedmpi."):
            continue
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        named = (texts & sources().keys()) - {"fedmpi", "data_prep", BY_NAME.get(name)}
        upward = {found for found in named if floor.get(room(found), len(FLOORS)) > floor[room(name)]}
        assert not upward, f"{name} names {upward}"


def test_arrays_of_whole_numbers_and_of_floats_have_one_name_each() -> None:
    home = ROOT / "fedmpi" / "common" / "types.py"
    raw = re.compile(r"NDArray\[np\.(?:int64|float64)\]|ndarray\[.*dtype\[np\.(?:int64|float64)\]")
    aliases = re.findall(r"^(\w+) = NDArray\[np\.(?:int64|float64)\]$", home.read_text(), re.MULTILINE)
    assert aliases == ["Ints", "Floats"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("fedmpi", "data_prep", "benchmarks", "docs/examples", "jobs")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != home
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if raw.search(line)
    ]
    assert not found, "Ints and Floats of fedmpi.common.types are meant:\n" + "\n".join(found)


def test_annotations_of_arrays_name_their_values() -> None:
    """Annotations name an alias or a type of NumPy's; a bare array would pass for one of any dtype anywhere."""
    home = ROOT / "fedmpi" / "common" / "types.py"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in ("fedmpi", "data_prep", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != home
        for line, text in bare_arrays(ast.parse(path.read_text()))
    ]
    assert not wrong, "say what these hold; of any dtype is AnyArray of fedmpi.common.types:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "x: np.ndarray",
        "def f(x: list[np.ndarray]): ...",
        "def f() -> ndarray | None: ...",
        "Arrays = dict[str, np.ndarray]",
        "x: npt.NDArray[Any] = np.ndarray(3)",
        'Kept = TypeVar("Kept", bound=NDArray[np.generic])',
    ],
)
def test_a_bare_array_is_found_anywhere(source: str) -> None:
    assert [line for line, _ in bare_arrays(ast.parse(source))] == [1]


@pytest.mark.parametrize(
    "source", ["isinstance(x, Number | np.ndarray)", "np.ndarray(3)", "x: list[NDArray[np.int32]]"]
)
def test_arrays_that_are_made_or_looked_for_are_not_bare(source: str) -> None:
    assert not [*bare_arrays(ast.parse(source))]


def bare_arrays(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every array type without a dtype, but for calls and what `isinstance` asks."""
    fine: set[ast.AST] = set()
    for node in ast.walk(tree):  # a node comes before those within it
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) not in ("Any", "np.generic"):
            fine.add(node.value)
        elif isinstance(node, ast.Call):
            fine |= {*ast.walk(node)} if ast.unparse(node.func) == "isinstance" else {node.func}
        elif isinstance(node, ast.Name | ast.Attribute) and node not in fine:
            text = ast.unparse(node)
            if text.rpartition(".")[2] in ("ndarray", "NDArray"):
                yield node.lineno, text


def test_a_class_or_function_has_a_name_of_its_own() -> None:
    """One name for one thing. Commands have the names of the functions that they call, checks those of the components
    that they try, and readers of data sets one name each."""
    homes: dict[str, set[str]] = {}
    for name, path in sources().items():
        functions = name.startswith("fedmpi.") and room(name) not in ("cli", "testing", "__main__")
        kinds = ast.ClassDef | ast.FunctionDef if functions else ast.ClassDef
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(name)
    assert {name: found for name, found in homes.items() if len(found) > 1}.keys() == TWICE


def test_what_the_package_itself_names_is_looked_up_when_asked_for() -> None:
    tree = ast.parse((ROOT / "fedmpi" / "__init__.py").read_text())
    at_once = [name for node in tree.body for name in imported(node) if not isinstance(node, ast.If)]
    assert not [name for name in at_once if name.startswith("fedmpi")]
    for name, path in sources().items():
        if room(name) not in ("", "cli", "testing") and name.startswith("fedmpi."):
            assert asked_of_the_package(path) <= {"__version__", "__file__"}, name


def test_libraries_have_one_door_each() -> None:
    for library, doors in DOORS.items():
        users = {name for name, path in sources().items() if library in {m.partition(".")[0] for m in uses(path)}}
        wrong = sorted(name for name in users if not name.startswith(tuple(f"{door}." for door in doors) + doors))
        assert users and not wrong, f"{library} is imported by {wrong}"


def test_built_in_components_import_nothing_that_runs_them() -> None:
    """Modules that a user's file can import and use alone: no configuration, no ranks, no engine, no round."""
    for kind in (kind for kind in KINDS.values() if not kind.key.startswith("--")):
        for module in set(kind.modules) - PART_OF_THE_ENGINES:
            reached = {name for name in all_below(module) if room(name) not in ("common", "clients", room(module))}
            assert reached <= SHARED, f"{module} leads to {reached - SHARED}"
            assert not [name for name in all_below(module) if name.endswith(("engines", "batched", "sequential"))]


def all_below(module: str, reached: frozenset[str] = frozenset()) -> frozenset[str]:
    """A module and every one that importing it imports, those for type checkers left out."""
    reached = reached | {module}
    for name in sorted(uses(sources()[module], typing=False)):
        if name in sources() and name != "fedmpi" and name not in reached:
            reached = all_below(name, reached)
    return reached


def test_the_floors_name_rooms_that_exist() -> None:
    existing = {path.stem for path in (ROOT / "fedmpi").iterdir() if path.suffix in ("", ".py")}
    assert {name for names in FLOORS for name in names} <= existing
    assert fedmpi.__file__ and Path(fedmpi.__file__).parent == ROOT / "fedmpi"


def listed(found: list[Arrow]) -> str:
    return "\n".join(f"{arrow.importer} imports {arrow.module}" for arrow in found)


@cache
def arrows() -> tuple[Arrow, ...]:
    """All imports of fedmpi's modules by fedmpi's modules."""
    own = {name: path for name, path in sources().items() if name.partition(".")[0] == "fedmpi"}
    found = {Arrow(name, module) for name, path in own.items() for module in uses(path) if module in own}
    return tuple(sorted(found, key=lambda arrow: (arrow.importer, arrow.module)))


def between_rooms() -> list[Arrow]:
    return [arrow for arrow in arrows() if "" not in arrow.rooms and arrow.rooms[0] != arrow.rooms[1]]


@cache
def sources() -> dict[str, Path]:
    """The files of fedmpi and data_prep by module."""
    paths = [path for package in ("fedmpi", "data_prep") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def uses(path: Path, typing: bool = True) -> frozenset[str]:
    """Every module that a file imports anywhere in it, with or without what only type checkers read."""
    tree = ast.parse(path.read_text())
    if not typing:
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(getattr(node, "test", node))]
    return frozenset(name for node in ast.walk(tree) for name in imported(node))


def asked_of_the_package(path: Path) -> set[str]:
    """Names that a file takes from `fedmpi` itself, by either way of importing it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fedmpi":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fedmpi":
            found.add(node.attr)
    return found


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        modules = [f"{node.module}.{name.name}" for name in node.names if f"{node.module}.{name.name}" in sources()]
        yield from modules
        if len(modules) < len(node.names):
            yield node.module


def test_what_has_a_public_name_is_imported_by_it_where_users_read() -> None:
    wrong = []
    for folder in ("tests", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedmpi."):
                    inside = [name.name for name in node.names if fedmpi._HOMES.get(name.name) == node.module]
                    wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: from fedmpi import {name}" for name in inside]
    assert not wrong


def test_names_are_plain_words() -> None:
    wrong = []
    for folder in ("fedmpi", "data_prep", "benchmarks", "docs", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            named = [(1, path.stem), *(identifiers(ast.parse(text)) if may_hold_a_metaphor(text) else ())]
            wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in named if is_metaphor(name)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        *("told=1", "def f(*, heard): ...", "a._foretold", "class AllTold: ...", "f(told=1)"),
        *("def _look_away(): ...", "class LookAway: ..."),
    ],
)
def test_a_metaphor_is_found_in_any_name(source: str) -> None:
    assert may_hold_a_metaphor(source)
    assert any(is_metaphor(name) for _, name in identifiers(ast.parse(source)))


def may_hold_a_metaphor(text: str) -> bool:
    """Without one of the words, however they are joined, no name of a source can be a metaphor: most are not parsed."""
    joined = text.lower().replace("_", "")
    return any(metaphor.replace("_", "") in joined for metaphor in METAPHORS)


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all that a source names, texts left out."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node) if not isinstance(node, ast.Constant) else ():
            names = value if isinstance(value, list) else [value]
            yield from ((getattr(node, "lineno", 1), name) for name in names if isinstance(name, str))


@cache
def is_metaphor(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return any(metaphor in words and re.search(rf"(?<![a-z]){metaphor}(?![a-z])", words) for metaphor in METAPHORS)
