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
from dataclasses import dataclass
from functools import cache, cached_property, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedmpi.common.errors import UserError, shown, suggestion
from fedmpi.common.imports import load, object_name, written_name
from fedmpi.common.options import (
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
    given: tuple[str, ...] = ()  # keyword-only parameters that are no options: the caller of the component sets them
    further: tuple[str, ...] = ()  # other keys that choose a component of this kind


PACKAGE = Path(__file__).parents[1]


def modules_in(folder: str) -> tuple[str, ...]:
    """Return the names of the modules in a folder of fedmpi, sorted."""
    files = sorted((PACKAGE / folder).glob("[a-z]*.py"))
    return tuple(".".join(("fedmpi", *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files)


FURTHER_RATES = tuple(
    f"devices.{key}" for key in ("upload", "download", "power.download", "power.training", "power.upload")
)
SCHEMES = tuple(f"data_prep.partitions.{family}" for family in ("labels", "sizes", "astraea"))
"""Modules of partitions, in the order in which they are listed."""
KINDS = {
    kind.name: kind
    for kind in (
        Kind("client sampler", "clients.sampler", ("fedmpi.clients.samplers", *modules_in("clients/selection"))),
        Kind("data sampler", "samples.sampler", ("fedmpi.samples.rules", *modules_in("samples/selection"))),
        Kind("weights", "server.weights", ("fedmpi.aggregation.weights",)),
        Kind("aggregator", "server.aggregator", ("fedmpi.aggregation.aggregators",), given=("clients",)),
        Kind("server optimizer", "server.optimizer", ("fedmpi.aggregation.server_optimizers",)),
        Kind("compressor", "compression", ("fedmpi.updates.compression",)),
        Kind("attack", "attack", ("fedmpi.updates.attacks",)),
        Kind("local algorithm", "local.algorithm", ("fedmpi.local.algorithms", "fedmpi.local.personalization")),
        Kind("local optimizer", "local.optimizer", ("fedmpi.local.optimizers",), given=("lr",)),
        Kind("schedule", "local.schedule", ("fedmpi.local.optimizers",)),
        Kind("model", "model", ("fedmpi.models.image_models", "fedmpi.models.text_models"), late=True),
        Kind(SOURCE, "data.source", ("fedmpi.data.opening",)),
        Kind("loss", "task.loss", ("fedmpi.tasks.losses",)),
        Kind("metric", "task.metrics", ("fedmpi.tasks.metrics",)),
        Kind("feature", "clients.sampler.features", ("fedmpi.clients.features",), given=("lr",)),
        Kind("availability", "clients.availability", ("fedmpi.clients.availability",)),
        Kind("device rate", "devices.speed", ("fedmpi.clients.devices",), False, ("default",), FURTHER_RATES),
        Kind("scheduling", "topology.scheduling", ("fedmpi.mediators.scheduling",)),
        Kind("staleness", "topology.staleness", ("fedmpi.aggregation.staleness",)),
        Kind("partition", "--partition", SCHEMES),
        Kind("data set", "--dataset", ("data_prep.datasets",)),
    )
}
"""All kinds by name."""

SERVICES: dict[str, type[Table]] = {}
"""Services that a component can need beside its own code: name → options, keys of the component's table."""

_BUILT_IN: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in KINDS}


class Component:
    """Function or class that a key of the configuration chooses, with its options.

    `choice` is a built-in name, "package.module:object", or the object itself; for data also a folder, or arrays.
    `given` are the options that are set, `own` those that belong to a name without any function or class.
    """

    def __init__(
        self, kind: str, choice: Any, given: Mapping[str, Any] | None = None, own: Options | None = None, key: str = ""
    ):
        self.kind, self.choice, self.key = kind, choice, key or KINDS[kind].key
        self.given: Mapping[str, Any] = {} if given is None else given
        if own is not None:
            self.own, self.object, self.marks = own, None, {}

    @classmethod
    def read(cls, kind: str, value: Any, default: str, key: str = "") -> Component:
        """Return what a value of the configuration chooses: a name, an object, or a table of name and options."""
        if isinstance(value, Component):
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
        return cls(kind, built_in_name(choice) or choice, table, key=key)

    @cached_property
    def name(self) -> str:
        """Return the built-in name, "module:object", or a folder of data."""
        return self.choice if isinstance(self.choice, str) else built_in_name(self.choice) or written_name(self.choice)

    @property
    def foreign(self) -> bool:
        """Check whether it is a custom component."""
        return ":" in self.name

    @property
    def is_component(self) -> bool:
        """Check whether there is a component, and not a folder of data or arrays."""
        return self.kind != SOURCE or makes_data(self.choice)

    @property
    def late(self) -> bool:
        """Check whether its options are not checked with the configuration, but when it is made."""
        return KINDS[self.kind].late or not self.is_component

    @cached_property
    def object(self) -> Any:
        """Return the function, class or object as its author wrote it."""
        found = self.choice
        if isinstance(found, str):
            registered = _registered(self.kind)
            if found not in registered and ":" not in found:
                names = list(_built_in(self.kind))
                advice = suggestion(found, names, f"choose one of {', '.join(names)}." if names else "choose.")
                raise UserError(f'{self.key} = {found!r} is unknown: {advice} Or your own, "package.module:object"')
            found = registered[found] if found in registered else load(found, self.key)
        marked = getattr(found, MARKS, {}).get("kind", self.kind)
        if marked != self.kind:
            raise UserError(f"{self.key} = {self.name!r} is a {marked}. This key chooses a {self.kind}")
        return found

    @cached_property
    def marks(self) -> dict[str, Any]:
        """Return the arguments of its decorator."""
        found = getattr(self.object, MARKS, {})
        return {name: value for name, value in found.items() if name not in ("kind", "name")}

    @property
    def title(self) -> str:
        """Return the first sentence of its docstring, on one line."""
        return first_sentence(docstring(self.object))

    @property
    def source(self) -> Path | None:
        """Return the file of a custom component; None for a built-in one and without a file (typed in at a prompt)."""
        module = sys.modules.get(object_name(self.object).partition(":")[0])
        path = getattr(module, "__file__", None) if self.foreign else None
        return Path(path).resolve() if path and Path(path).suffix == ".py" and Path(path).is_file() else None

    @cached_property
    def own(self) -> Options:
        """Return its keyword-only parameters by name."""
        return own_options(self.object, self.kind) if self.foreign else _of_built_in(self.object, self.kind)

    @property
    def _services(self) -> type[Table] | None:
        """Return the table of options for what it needs beside its own code."""
        return next((SERVICES[need] for need in self.marks.get("needs", ()) if need in SERVICES), None)

    @property
    def fields(self) -> Options:
        """Return its own options and those for what it needs beside its own code, as fields of a table."""
        others = {} if self._services is None else self._services.model_fields
        return {**self.own, **others, **self.own}

    @cached_property
    def _type(self) -> type[Table]:
        """Return the type of the table of its options."""
        base = self._services or Table
        if self.foreign or self.object is None:
            return options_table(self.own, base, self.foreign)
        return _type_of_built_in(self.object, self.kind, base)

    @cached_property
    def _table(self) -> Table:
        """Return the table of its options with the given values."""
        if "name" in self.fields:
            raise UserError(f"{self.key} = {self.name!r} has an option called name, the key of its own name. Rename it")
        try:
            return self._type.model_validate(dict(self.given))
        except ValidationError as error:
            errors = error.errors(include_url=False)
            first = next((one for one in errors if one["type"] != "missing"), errors[0])
        within = location(first, self.given)
        if first["type"] == "missing" and len(within) == 1:
            missing = " and ".join(self._key_of(str(one["loc"][0])) for one in errors)
            raise UserError(f"{self.key} = {self.name!r} needs {missing}, without a default. Set it")
        if first["type"] == "extra_forbidden":
            if len(within) == 1:
                raise UserError(self.unknown(within[0]))
            field = self.fields.get(within[0])
            needed = f"{self._key_of(within[0])} = {names_with(field and field.annotation, within[-1])}"
            raise UserError(f"{'.'.join((self.key, *within))} has no effect here: it needs {needed}")
        key, value = self._key_of(".".join(within)), reduce(getitem, within, self.given)
        raise UserError(f"{key} = {shown(value, repr)} does not suit {self.name}: {reason_of(first)}")

    @property
    def services(self) -> Any:
        """Return the table with the options of what it needs beside its own code; None if it needs nothing."""
        return None if not self.is_component or self._services is None else self._table

    @property
    def values(self) -> dict[str, Any]:
        """Return all options with their defaults, converted; those that were set if they are checked late."""
        return dict(self.given) if self.late else dict(self._table)

    @property
    def options(self) -> dict[str, Any]:
        """Return `values` without those of `services`."""
        return {name: value for name, value in self.values.items() if self.late or name in self.own}

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given options converted to their types: 1 as 1.0 for a float, a list as a tuple."""
        other = copy.copy(self)
        other.given = given
        vars(other).pop("_table", None)  # of the options given before
        found = other._table
        return {name: getattr(found, name) for name in given}

    def make(self, options: Mapping[str, Any] | None = None) -> Any:
        """Return the component ready for use, with these options instead of the given ones.

        A function has its options bound, a class is an instance, and an object a copy.
        """
        found = self.checked(self.options if options is None else options)
        bound = {name: value for name, value in found.items() if name in self.own}
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
        key = self._key_of(name)
        if name in positional(self.object):
            return f"{key} is no option of {self.name}: put a star before the parameter, (*, {name})"
        others = [f'"{other.name}"' for other in components(self.kind) if name in other.fields]
        if others:
            return f"{key} has no effect here: it needs {self.key} = {' or '.join(others)}"
        listed = f"its options are {', '.join(self.fields)}" if self.fields else "it has no options"
        return f"{key} is unknown to {self.name}: {suggestion(name, [*self.fields, 'name'], listed, 0.5)}"

    def _key_of(self, option: str) -> str:
        """Return the name of an option as the user sets it: "samples.sampler.share", or "--share"."""
        return "--" + option.replace("_", "-") if self.key.startswith("--") else f"{self.key}.{option}"

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Component) or (self.kind, self.choice) != (other.kind, other.choice):
            return False
        if not self.late and self.own.keys() != other.own.keys():
            return False
        return self.given == other.given or self.values == other.values

    def __hash__(self) -> int:
        return hash((self.kind, self.name))

    def __repr__(self) -> str:
        return repr({"name": self.name, **self.given} if self.given else self.name)


def resolve(kind: str, choice: Any) -> Component:
    """Return the component of a choice, which exists."""
    found = Component(kind, choice)
    found.object  # noqa: B018 - rejects unknown names
    return found


def describe(choice: Any) -> Component:
    """Return the component of a choice whose kind its decorator or its unique built-in name says."""
    if isinstance(choice, str) and ":" not in choice:
        kinds = [kind for kind in KINDS if choice in _built_in(kind)]
        if len(kinds) == 1:
            return resolve(kinds[0], choice)
        if not kinds:
            names = sorted({name for kind in KINDS for name in _built_in(kind)})
            advice = suggestion(choice, names, "`fedmpi components` lists all.")
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
    return [Component(k, name) for k in kinds for name in _built_in(k)]


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


def own_options(found: Any, kind: str) -> Options:
    """Return the options of an object of a kind."""
    return {name: field for name, field in options_of(found, kind == "model").items() if name not in KINDS[kind].given}


_of_built_in = cache(own_options)
"""The same from a cache: a configuration requests each built-in component hundreds of times."""


@cache
def _type_of_built_in(found: Any, kind: str, base: type[Table]) -> type[Table]:
    """Return the type of the table of a built-in component's options; making it takes milliseconds."""
    return options_table(_of_built_in(found, kind), base, custom=False)


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
