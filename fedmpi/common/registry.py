"""Components that a configuration can choose: by built-in name, by "package.module:object", or as an object.

A component is a function or a class. Its options are its keyword-only parameters, set in the configuration next to the
key that chooses it. Built-in and custom components are resolved, checked and called in the same way.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedmpi.common.errors import UserError, shown, suggestion
from fedmpi.common.imports import load, object_name, written_name
from fedmpi.common.options import (
    OpenTable,
    Options,
    Table,
    docstring,
    first_sentence,
    location,
    names_with,
    options_of,
    options_table,
    positional,
    reason_of,
)

MARKS = "__fedmpi__"
"""Attribute of a decorated object with its kind, its built-in name and its marks."""

SOURCE = "data source"
"""Kind of components that make the data of a run."""
DIGITS = "digits"
"""Name of the embedded data set."""
ARRAYS = "ClientArrays"
"""Prefix of the names of data given as arrays, which no name can restore."""

Marked = TypeVar("Marked", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """Kind of component, chosen by one key of the configuration."""

    name: str  # common nouns, used in messages
    key: str  # key of the configuration, whose table has the options of the component
    modules: tuple[str, ...] = ()  # modules that register the built-in ones; imported on demand
    # True checks options when the component is made instead of with the configuration (its import takes long)
    late: bool = False
    several: bool = False  # True if the key lists any number of components
    given: tuple[str, ...] = ()  # keyword-only parameters that are no options: the caller of the component sets them


SCHEMES = tuple(f"data_prep.partitions.{family}" for family in ("labels", "sizes", "astraea"))
"""Modules of partitions, in the order in which they are listed."""
KINDS = {
    kind.name: kind
    for kind in (
        Kind("client sampler", "clients.sampler", ("fedmpi.clients.samplers",)),
        Kind("data sampler", "samples.sampler", ("fedmpi.samples.rules",)),
        Kind("weights", "server.weights", ("fedmpi.aggregation.weights",)),
        Kind("aggregator", "server.aggregator", ("fedmpi.aggregation.aggregators",)),
        Kind("server optimizer", "server.optimizer", ("fedmpi.aggregation.server_optimizers",)),
        Kind("compressor", "compression", ("fedmpi.updates.compression",)),
        Kind("attack", "attack", ("fedmpi.updates.attacks",)),
        Kind("local algorithm", "local.algorithm", ("fedmpi.local.algorithms",)),
        Kind("local optimizer", "local.optimizer", ("fedmpi.local.optimizers",), given=("lr",)),
        Kind("schedule", "local.schedule", ("fedmpi.local.optimizers",)),
        Kind("model", "model", ("fedmpi.models.image_models", "fedmpi.models.text_models"), late=True),
        Kind(SOURCE, "data.source", ("fedmpi.data.opening",)),
        Kind("loss", "task.loss", ("fedmpi.tasks.losses",)),
        Kind("metric", "task.metrics", ("fedmpi.tasks.metrics",), several=True),
        Kind("availability", "clients.availability", ("fedmpi.clients.availability",)),
        Kind("scheduling", "topology.scheduling", ("fedmpi.mediators.scheduling",)),
        Kind("partition", "--partition", SCHEMES),
        Kind("data set", "--dataset", ("data_prep.datasets",)),
    )
}
"""All kinds by name."""

SERVICES: dict[str, type[Table]] = {}
"""Services that a component can need beside its own code: name → options, keys of the component's table."""

_BUILT_IN: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in KINDS}


@dataclass(frozen=True, eq=False)
class Component:
    """Marked component."""

    kind: str  # key of `KINDS`
    name: str  # built-in name, or "module:object"
    object: Any  # object as its author wrote it
    marks: dict[str, Any] = field(default_factory=dict)  # arguments of its decorator
    # File of a custom component; None for built-in ones and without a file (typed in at a prompt)
    source: Path | None = None
    own_options: Options = field(default_factory=dict)  # its keyword-only parameters
    takes_any: bool = False  # True if it accepts options of any name (**options)

    @property
    def foreign(self) -> bool:
        """Check whether it is a custom component."""
        return ":" in self.name

    @property
    def key(self) -> str:
        """Return the key of the configuration that chooses it."""
        return KINDS[self.kind].key

    @property
    def title(self) -> str:
        """Return the first sentence of its docstring, on one line."""
        return first_sentence(docstring(self.object))

    @property
    def services(self) -> type[Table] | None:
        """Return the table of options for what it needs beside its own code."""
        return next((SERVICES[need] for need in self.marks.get("needs", ()) if need in SERVICES), None)

    @cached_property
    def options(self) -> Options:
        """Return all options: its own ones, then those of `services`."""
        others = {} if self.services is None else self.services.model_fields
        return {**self.own_options, **others, **self.own_options}

    @cached_property
    def table(self) -> type[Table]:
        """Return the table of its options, those in `services` among them."""
        base = self.services or (OpenTable if self.takes_any else Table)
        return options_table(self.own_options, base) if self.own_options else base

    def read(self, given: Mapping[str, Any]) -> Table:
        """Return the table of its options with the given values."""
        if "name" in self.options:
            raise UserError(f"{self.key} = {self.name!r} has an option called name, the key of its own name. Rename it")
        try:
            return self.table.model_validate(dict(given))
        except ValidationError as error:
            errors = error.errors(include_url=False)
            first = next((one for one in errors if one["type"] != "missing"), errors[0])
        within = location(first, given)
        if first["type"] == "missing" and len(within) == 1:
            missing = [self._key_of(str(one["loc"][0])) for one in errors]
            advice = "which has no default: set it" if len(missing) == 1 else "which have no defaults: set them"
            raise UserError(f"{self.key} = {self.name!r} needs {' and '.join(missing)}, {advice}")
        if first["type"] == "extra_forbidden":
            if len(within) == 1:
                raise UserError(self.unknown(within[0]))
            field = self.options.get(within[0])
            needed = f"{self._key_of(within[0])} = {names_with(field and field.annotation, within[-1])}"
            raise UserError(f"{'.'.join((self.key, *within))} has no effect here: it needs {needed}")
        key, value = self._key_of(".".join(within)), reduce(getitem, within, given)
        raise UserError(f"{key} = {shown(value, repr)} does not suit {self.name}: {reason_of(first)}")

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given options converted to their types: 1 as 1.0 for a float, a list as a tuple."""
        found = self.read(given)
        return {name: getattr(found, name) for name in given}

    def make(self, options: Mapping[str, Any]) -> Any:
        """Return the component ready for use: a function with its options bound, or an instance of the class."""
        services = self.options.keys() - self.own_options.keys()
        bound = {name: value for name, value in self.checked(options).items() if name not in services}
        if not inspect.isclass(self.object):
            made = self.object if inspect.isroutine(self.object) else copy.deepcopy(self.object)
            return partial(made, **bound) if bound else made
        unset = [name for name, needed in positional(self.object).items() if needed] if self.foreign else []
        if unset:
            raise UserError(
                f"{self.key} = {self.name!r} is built from options only, but its __init__ needs {unset[0]}. Write "
                f"keyword-only options, def __init__(self, *, {', '.join(unset)})"
            )
        return self.object(**bound)

    def unknown(self, name: str) -> str:
        """Return the error text about an option that this component does not have."""
        if name in positional(self.object):
            advice = f"put a star before the parameter, (*, {name}), or write a function with this option that calls it"
            return f"{self._key_of(name)} is no option of {self.name}: {advice}"
        others = [f'"{other.name}"' for other in components(self.kind) if name in other.options]
        if others:
            return f"{self._key_of(name)} has no effect here: it needs {self.key} = {' or '.join(others)}"
        listed = f"its options are {', '.join(self.options)}" if self.options else "it has no options"
        return (
            f"{self._key_of(name)} is unknown to {self.name}: {suggestion(name, [*self.options, 'name'], listed, 0.5)}"
        )

    def _key_of(self, option: str) -> str:
        """Return the name of an option as the user sets it: "samples.sampler.share", or "--share"."""
        return "--" + option.replace("_", "-") if self.key.startswith("--") else f"{self.key}.{option}"


class Chosen:
    """Component as a configuration chooses it: a built-in name, "module:object" or an object, and options."""

    def __init__(self, kind: str, choice: Any, given: Mapping[str, Any] | None = None):
        self.kind = kind  # key of `KINDS`
        self.choice = choice
        self.given: Mapping[str, Any] = {} if given is None else given  # options that the user set

    @classmethod
    def read(cls, kind: str, value: Any, default: str) -> Chosen:
        """Return what a value of the configuration chooses: a name, an object, or a table of name and options."""
        if isinstance(value, Chosen):
            return value
        table = dict(value) if isinstance(value, Mapping) else {"name": value}
        choice = table.pop("name", default)
        if isinstance(choice, Path):
            choice = str(choice)
        elif isinstance(choice, partial):
            raise ValueError("give a table with the function as name and its options instead of functools.partial")
        if kind == SOURCE and is_digits(choice):
            named = _options_in_name(choice)
            if twice := sorted(named.keys() & table.keys()):
                raise UserError(
                    f"data.source = {choice!r} and data.source.{twice[0]} = {table[twice[0]]!r} say the same in two "
                    "ways. Keep one of them"
                )
            choice, table = DIGITS, {**named, **table}
        if type(choice).__module__ in ("builtins", "datetime") and not (isinstance(choice, str) or callable(choice)):
            raise ValueError('give a name, "package.module:object", or the object itself')
        return cls(kind, built_in_name(choice) or choice, table)

    @cached_property
    def component(self) -> Component:
        """Return the component."""
        return resolve(self.kind, self.choice)

    @property
    def name(self) -> str:
        """Return the built-in name, "module:object", or a folder of data."""
        return self.choice if isinstance(self.choice, str) else written_name(self.choice)

    @property
    def late(self) -> bool:
        """Check whether options are checked when the component is made."""
        return KINDS[self.kind].late

    @property
    def is_component(self) -> bool:
        """Check whether there is a component, and not a folder of data or arrays."""
        return self.kind != SOURCE or makes_data(self.choice)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Return the component's options with their defaults, converted; of a late kind those that were set."""
        if not self.is_component or self.late:
            return dict(self.given)
        found = {name: getattr(self._table, name) for name in self.component.own_options}
        return found | (self._table.__pydantic_extra__ or {})

    @property
    def services(self) -> Any:
        """Return the table with the options of what it needs beside its own code; None if it needs nothing."""
        return None if not self.is_component or self.component.services is None else self._table

    @cached_property
    def _table(self) -> Table:
        return self.component.read(self.given)

    @property
    def has_defaults(self) -> bool:
        """Check whether all options have their defaults."""
        return all(self.options[name] == field.default for name, field in self.component.own_options.items())

    def make(self) -> Any:
        """Return the component ready for use: a function with its options bound, or a new instance of the class."""
        return self.component.make(self.options)

    @property
    def values(self) -> dict[str, Any]:
        """Return all options, those of `services` among them."""
        names = self.component.options if self.is_component and not self.late else {}
        return self.options | {name: getattr(self._table, name) for name in names}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chosen) or (self.kind, self.choice) != (other.kind, other.choice):
            return False
        return self.given == other.given if self.late or not self.is_component else self.values == other.values

    def __hash__(self) -> int:
        return hash((self.kind, self.name))

    def __repr__(self) -> str:
        return repr({"name": self.name, **self.given} if self.given else self.name)


def resolve(kind: str, choice: Any) -> Component:
    """Return the component of a choice."""
    if isinstance(choice, str):
        registered = _registered(kind)
        if choice in registered:
            return _built_in_component(kind, choice, registered[choice])
        if ":" not in choice:
            raise UserError(_unknown_name(kind, choice, list(_built_in(kind))))
        return _component(kind, choice, load(choice, KINDS[kind].key))
    return _component(kind, built_in_name(choice) or object_name(choice), choice)


def describe(choice: Any) -> Component:
    """Return the component of a choice whose kind its decorator or its unique built-in name says."""
    if isinstance(choice, str) and ":" not in choice:
        kinds = [kind for kind in KINDS if choice in _built_in(kind)]
        if len(kinds) == 1:
            return resolve(kinds[0], choice)
        if not kinds:
            names = sorted({name for kind in KINDS for name in _built_in(kind)})
            meant = _as_own(choice)
            advice = f"did you mean {meant}?" if meant else suggestion(choice, names, "`fedmpi components` lists all.")
            raise UserError(f'there is no component {choice!r}: {advice} Your own has a name as "module:object"')
        raise UserError(f'{choice!r} names a {" and a ".join(kinds)}: say which, as with --kind "{kinds[0]}"')
    found = load(choice, "component") if isinstance(choice, str) else choice
    kind = getattr(found, MARKS, {}).get("kind")
    if kind is None:
        raise UserError(
            f"{choice!r} does not say what kind of component it is. Name its kind with --kind (one of "
            f"{', '.join(KINDS)}), or decorate it, as with @fedmpi.compressor"
        )
    return resolve(kind, choice)


def components(kind: str | None = None) -> list[Component]:
    """Return the built-in components of a kind, or of all kinds.

    Raises
    ------
    UserError
        The kind does not exist.
    """
    kinds = KINDS if kind is None else [known_kind(kind)]
    return [_built_in_component(k, name, found) for k in kinds for name, found in _built_in(k).items()]


def known_kind(kind: str) -> str:
    """Return the name of a kind; reject unknown ones."""
    if kind not in KINDS:
        advice = suggestion(str(kind), KINDS, f"there are {', '.join(KINDS)}")
        raise UserError(f"there is no kind of component {kind!r}: {advice}")
    return kind


def register(kind: str, name: str | None = None, **marks: Any) -> Callable[[Marked], Marked]:
    """Return a decorator that makes a function or class a component of the given kind; it stays callable as before."""

    def mark(chosen: Marked) -> Marked:
        if not callable(chosen):
            raise UserError(f"a {kind} is a function or a class, not {chosen!r}")
        setattr(chosen, MARKS, {"kind": kind, "name": name, **marks})
        if name is not None:
            _BUILT_IN[kind][name] = chosen
        return chosen

    return mark


def built_in_name(chosen: Any) -> str | None:
    """Return the built-in name of a function or class; None for all others."""
    marks = getattr(chosen, MARKS, {})
    registered = _BUILT_IN.get(marks.get("kind", ""), {})
    name: str | None = marks.get("name")
    return name if name is not None and registered.get(name) is chosen else None


def _registered(kind: str) -> dict[str, Callable[..., Any]]:
    """Return the built-in components of a kind by name, in arbitrary order."""
    for module in KINDS[kind].modules:
        importlib.import_module(module)
    return _BUILT_IN[kind]


def _built_in(kind: str) -> dict[str, Callable[..., Any]]:
    """Return the built-in components in the order of the kind's modules."""
    modules, found = KINDS[kind].modules, _registered(kind).items()
    return dict(sorted(found, key=lambda item: (*modules, item[1].__module__).index(item[1].__module__)))


@cache
def _built_in_component(kind: str, name: str, found: Any) -> Component:
    """Return a built-in component from the cache; a configuration requests each of them hundreds of times."""
    return _component(kind, name, found)


def _component(kind: str, name: str, found: Any) -> Component:
    marks = dict(getattr(found, MARKS, {}))
    own = marks.pop("kind", kind)
    marks.pop("name", None)
    if own != kind:
        raise UserError(f"{KINDS[kind].key} = {name!r} is a {own}. This key chooses a {kind}")
    found_options, takes_any = options_of(found, positional=kind == "model")
    options = {name: field for name, field in found_options.items() if name not in KINDS[kind].given}
    return Component(kind, name, found, marks, _source(found) if ":" in name else None, options, takes_any)


def _source(found: Any) -> Path | None:
    module = sys.modules.get(object_name(found).partition(":")[0])
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path and Path(path).suffix == ".py" and Path(path).is_file() else None


def _as_own(choice: str) -> str:
    """Return how to write a file, or an object with a dot, as a component; "" if a choice is neither."""
    module, _, name = choice.rpartition("/")[2].rpartition(".")
    if not module.isidentifier() or not name.isidentifier():
        return ""
    return f"{module}:NAME" if name == "py" else f"{module}:{name}"


def _unknown_name(kind: str, choice: str, names: list[str]) -> str:
    meant = _as_own(choice)
    hint = f"did you mean {meant}?" if meant else suggestion(choice, names, "")
    listed = f"choose one of {', '.join(names)}, or your own" if names else "choose your own"
    return f'{KINDS[kind].key} = {choice!r} is unknown: {hint}{" " * bool(hint)}{listed} "package.module:object"'


def is_digits(choice: Any) -> bool:
    """Check whether a value of `data.source` names the embedded digits: "digits" or "digits:key=value,..."."""
    return isinstance(choice, str) and choice.partition(":")[0] == DIGITS


def _options_in_name(choice: str) -> dict[str, str]:
    """Return the options in a name such as "digits:clients=50,partition=iid"."""
    items = [item.strip().partition("=") for item in choice.partition(":")[2].split(",") if item.strip()]
    if wrong := [key for key, equals, _ in items if not equals]:
        raise UserError(f"{wrong[0]!r} in data.source = {choice!r} is not key=value. Write e.g. digits:clients=50")
    return {key.strip(): value.strip() for key, _, value in items}


def in_memory(where: Any) -> bool:
    """Check whether `data.source` names data in memory: no text, or "package.module:function" and not a folder."""
    if not isinstance(where, str):
        return not isinstance(where, Path)
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*:[\w.<>-]+(\(\.\.\.\))?", where)) and not Path(where).exists()


def makes_data(where: Any) -> bool:
    """Check whether a value of `data.source` makes data with options: the digits, a function, or the name of one."""
    if is_digits(where):
        return True
    return in_memory(where) and not str(getattr(where, "config_name", where)).startswith(f"{ARRAYS}:")
