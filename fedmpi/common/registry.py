"""Components that a configuration can choose: by built-in name, by "package.module:object", or as an object.

A component is a function or a class. Its options are its keyword-only parameters, set in the configuration next to the
key that chooses it. Built-in and custom components are resolved, checked and called in the same way.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from fedmpi.common.data_choices import ARRAYS, DIGITS, is_digits, makes_data, options_in_name
from fedmpi.common.errors import UserError, shown
from fedmpi.common.imported import load
from fedmpi.common.options import (
    REQUIRED,
    Option,
    WrongOption,
    docstring,
    field_type,
    first_sentence,
    one_line,
    options_of,
    positional,
)
from fedmpi.common.own_code import NOT_THEIRS, OBJECT, as_written, holds_values, object_name, own_text

MARKS = "__fedmpi__"
"""Attribute of a decorated object with its kind, its built-in name and its marks."""

SOURCE = "data source"
"""Kind of components that make the data of a run."""

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

    def option_key(self, name: str) -> str:
        """Return the name of an option as the user sets it: "samples.sampler.share", or "--share"."""
        return "--" + name.replace("_", "-") if self.key.startswith("--") else f"{self.key}.{name}"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("client sampler", "clients.sampler", ("fedmpi.clients.samplers",)),
        Kind("data sampler", "samples.sampler", ("fedmpi.samples.built_in_rules",)),
        Kind("weights", "server.weights", ("fedmpi.aggregation.weights",)),
        Kind("aggregator", "server.aggregator", ("fedmpi.aggregation.combiners",)),
        Kind("server optimizer", "server.optimizer", ("fedmpi.aggregation.server_optimizers",)),
        Kind("local algorithm", "local.algorithm", ("fedmpi.local.built_in_algorithms",)),
        Kind("local optimizer", "local.optimizer", ("fedmpi.local.optimizers",), given=("lr",)),
        Kind("schedule", "local.schedule", ("fedmpi.local.learning_rates",)),
        Kind(
            "model",
            "model",
            tuple(
                f"fedmpi.models.{family}"
                for family in (
                    "mlp",
                    "image_cnns",
                    "resnet",
                    "text_models",
                    "next_token",
                )
            ),
            late=True,
        ),
        Kind(SOURCE, "data.source", ("fedmpi.data.digits_options",)),
        Kind("loss", "task.loss", ("fedmpi.tasks.losses",)),
        Kind("metric", "task.metrics", ("fedmpi.tasks.metrics",), several=True),
        Kind("availability", "clients.availability", ("fedmpi.clients.availability",)),
        Kind("scheduling", "topology.scheduling", ("fedmpi.mediators.scheduling",)),
        Kind("partition", "--partition", ("data_prep.parts",)),
        Kind("data set", "--dataset", ("data_prep.parts",)),
        Kind("feature shift", "--feature-shift", ("data_prep.shifts",)),
        Kind("label noise", "--label-noise", ("data_prep.shifts",)),
    )
}
"""All kinds by name."""

SERVICES: dict[str, type[BaseModel]] = {}
"""Services that a client sampler can request from the server: name → options, keys of the sampler's table."""

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
    options: tuple[Option, ...] = ()  # options of the component
    takes_any: bool = False  # True if it accepts options of any name (**options)

    @property
    def foreign(self) -> bool:
        """Check whether it is a custom component."""
        return ":" in self.name

    @property
    def _installed(self) -> bool:
        """Check whether it comes from Python itself or from an installed package."""
        return self.source is not None and any(self.source.is_relative_to(home) for home in NOT_THEIRS)

    @property
    def key(self) -> str:
        """Return the key of the configuration that chooses it."""
        return KINDS[self.kind].key

    @property
    def title(self) -> str:
        """Return the first sentence of its docstring, on one line."""
        return first_sentence(docstring(self.object))

    @cached_property
    def source_text(self) -> str:
        """Return the text of its file, or of the object without a file; "" if neither is available."""
        if self.source is not None:
            return self.source.read_text(encoding="utf-8", errors="replace")
        return own_text(self.object) if self.foreign else ""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of its source text."""
        return hashlib.sha256(self.source_text.encode()).hexdigest()

    def option(self, name: str) -> Option | None:
        """Return the option of that name, if there is one."""
        return next((option for option in (*self.options, *self.service_options) if option.name == name), None)

    @property
    def services(self) -> type[BaseModel] | None:
        """Return the table of options for what the server measures for this sampler."""
        return next((SERVICES[need] for need in self.marks.get("needs", ()) if need in SERVICES), None)

    @cached_property
    def service_options(self) -> tuple[Option, ...]:
        """Return the options in `services`."""
        own = {option.name for option in self.options}
        fields = {} if self.services is None else self.services.model_fields
        return tuple(
            Option(name, field.get_default(), field_type(field), one_line(field.description))
            for name, field in fields.items()
            if name not in own
        )

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options converted to their types."""
        required = [option.name for option in self.options if option.default is REQUIRED]
        if self.option("name") is not None:
            raise UserError(f"{self.key} = {self.name!r} has an option called name, the key of its own name: rename it")
        found = {}
        for name, value in options.items():
            option = self.option(name)
            if option is None and not self.takes_any:
                raise UserError(self.unknown(name))
            try:
                found[name] = value if option is None else option.converted(value)
            except WrongOption as error:
                key, reason = ".".join((self._key_of(name), *error.within)), str(error)
                if error.needs:
                    needed = f"{self._key_of(name)} = {error.needs}"
                    raise UserError(
                        f"{key} has no effect here: it needs {needed}. Remove it, or change that."
                    ) from None
                raise UserError(
                    f"{key} = {shown(error.value, repr)} does not suit {self.name}: {reason[:1].lower()}{reason[1:]}"
                ) from None
        missing = [name for name in required if name not in found]
        if missing:
            keys = " and ".join(self._key_of(name) for name in missing)
            advice = "which has no default: set it" if len(missing) == 1 else "which have no defaults: set them"
            raise UserError(f"{self.key} = {self.name!r} needs {keys}, {advice}")
        return found

    def make(self, options: Mapping[str, Any]) -> Any:
        """Return the component ready for use: a function with its options bound, or an instance of the class."""
        services = {option.name for option in self.service_options}
        bound = {name: value for name, value in self.checked(options).items() if name not in services}
        if not inspect.isclass(self.object):
            made = self.object if inspect.isroutine(self.object) else copy.deepcopy(self.object)
            return partial(made, **bound) if bound else made
        unset = [name for name, needed in positional(self.object).items() if needed] if self.foreign else []
        if unset:
            advice = f"write options after a star, def __init__(self, *, {', '.join(unset)})"
            if self._installed:
                advice = "write a class of your own that uses it"
            raise UserError(
                f"{self.key} = {self.name!r} is made of its options alone, and its __init__ wants {unset[0]}: {advice}"
            )
        return self.object(**bound)

    def unknown(self, name: str) -> str:
        """Return the error text about an option that this component does not have."""
        names = [option.name for option in (*self.options, *self.service_options)]
        near = get_close_matches(name, [*names, "name"], n=1, cutoff=0.5)
        if name in positional(self.object):
            advice = f"put a star before the parameter, (*, {name})"
            if self._installed:
                advice = f"write a function that hands it over, with a star before it, (…, *, {name})"
            return f"{self._key_of(name)} is no option of {self.name}: {advice}"
        listed = f"its options are {', '.join(names)}" if names else "it has no options"
        others = [f'"{other.name}"' for other in components(self.kind) if other.option(name) is not None]
        if others:
            return f"{self._key_of(name)} has no effect here: it needs {self.key} = {' or '.join(others)}"
        hint = f"did you mean {near[0]}?" if near else listed
        return f"{self._key_of(name)} is unknown to {self.name}: {hint}"

    def _key_of(self, option: str) -> str:
        return KINDS[self.kind].option_key(option)


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
        elif isinstance(choice, partial) and not choice.args:
            bound: partial[Any] = choice
            if _binds_options(kind, bound):
                choice, table = bound.func, {**bound.keywords, **table}
        if kind == SOURCE and is_digits(choice):
            named = options_in_name(choice)
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
        if isinstance(self.choice, str):
            return self.choice
        name: str | None = getattr(self.choice, "config_name", None)
        return name or object_name(self.choice) + (OBJECT if holds_values(self.choice) else "")

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
        defaults = {option.name: option.default for option in self.component.options if option.default is not REQUIRED}
        services = {option.name for option in self.component.service_options}
        return {**defaults, **{name: value for name, value in self._converted.items() if name not in services}}

    @cached_property
    def services(self) -> Any:
        """Return the table of options for what the server measures for a sampler; None if it needs nothing."""
        table = self.component.services if self.is_component else None
        if table is None:
            return None
        names = {option.name for option in self.component.service_options}
        return table.model_validate({name: value for name, value in self._converted.items() if name in names})

    @cached_property
    def _converted(self) -> dict[str, Any]:
        return self.component.checked(self.given)

    @property
    def has_defaults(self) -> bool:
        """Check whether all options have their defaults."""
        return all(self.options[option.name] == option.default for option in self.component.options)

    def make(self) -> Any:
        """Return the component ready for use: a function with its options bound, or a new instance of the class."""
        return self.component.make(self.options)

    @property
    def values(self) -> dict[str, Any]:
        """Return all options, those of `services` among them."""
        return {**self.options, **({} if self.services is None else dict(self.services))}

    def without_effect(self, name: str) -> str | None:
        """Return the condition without which an option has no effect here; None if it has one."""
        option, values = self.component.option(name), self.values
        conditions = [item for item in (option.conditions if option else ()) if item.key in values]
        missing = [item for item in conditions if not item.holds(values[item.key])]
        return " and ".join(str(item.within(self.component.key, values)) for item in missing) or None

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
    """Return the component of a choice whose kind follows from the object itself or from its unique built-in name.

    Without a decorator, the names of its parameters determine its kind (`KIND_BY_PARAMETERS`).
    """
    if isinstance(choice, str) and ":" not in choice:
        kinds = [kind for kind in KINDS if choice in _built_in(kind)]
        if len(kinds) == 1:
            return resolve(kinds[0], choice)
        if not kinds:
            names = sorted({name for kind in KINDS for name in _built_in(kind)})
            near = get_close_matches(choice, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else "`fedmpi components` lists all"
            raise UserError(f"there is no component {choice!r}: {hint}")
        raise UserError(f'{choice!r} names a {" and a ".join(kinds)}: say which, as with --kind "{kinds[0]}"')
    found = load(choice, "component") if isinstance(choice, str) else choice
    kind = getattr(as_written(found), MARKS, {}).get("kind") or _kind_of_call(found)
    if kind is None:
        raise UserError(
            f"{choice!r} does not say what kind of component it is: decorate it, e.g. with @fedmpi.client_sampler, or "
            "name the kind, e.g. with --kind availability"
        )
    return resolve(kind, choice)


KIND_BY_PARAMETERS = {
    ("labels", "clients", "generator"): "partition",
    ("class_counts", "most", "generator", "target"): "scheduling",
    ("parameters",): "local optimizer",
    ("params",): "local optimizer",
    ("description",): "model",
    ("raw",): "data set",
    ("clients", "generator"): "feature shift",
    ("labels", "owners", "classes", "generator"): "label noise",
}
"""Names of the positional parameters, or of the first → the only kind with this signature."""


def _kind_of_call(found: Any) -> str | None:
    """Return the kind that fits the signature of a function or object; None if several kinds fit."""
    called = inspect.unwrap(found.__call__) if inspect.isclass(found) else found
    names, made = _positional(called), _positional(found)
    returned = inspect.get_annotations(called).get("return")
    if _name_of(returned) == ARRAYS:
        return SOURCE
    if names == ("outputs", "targets"):
        return "metric" if _is_dictionary(returned) or hasattr(found, "result") else "loss"
    return KIND_BY_PARAMETERS.get(names) or KIND_BY_PARAMETERS.get(names[:1]) or KIND_BY_PARAMETERS.get(made[:1])


def _is_dictionary(annotation: Any) -> bool:
    return _name_of(annotation).lower() in ("dict", "mapping")


def _name_of(annotation: Any) -> str:
    """Return the name of a type, written as text or not, without its module and brackets."""
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return name.partition("[")[0].rpartition(".")[2]


def _positional(found: Any) -> tuple[str, ...]:
    """Return the names of the positional parameters except `self`."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")


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
        near = get_close_matches(str(kind), KINDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
        raise UserError(f"there is no kind of component {kind!r}: {hint}")
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


def custom_component(kind: str, choice: Any) -> Component | None:
    """Return the chosen component if it is custom, so that failures name it; None if it is built in."""
    part = resolve(kind, choice)
    return part if part.foreign else None


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
    marks = dict(getattr(as_written(found), MARKS, {}))
    own = marks.pop("kind", kind)
    marks.pop("name", None)
    if own != kind:
        raise UserError(f"{KINDS[kind].key} = {name!r} is a {own}: this key chooses a {kind}")
    found_options, takes_any = options_of(found, positional=kind == "model")
    options = tuple(option for option in found_options if option.name not in KINDS[kind].given)
    return Component(kind, name, found, marks, _source(found) if ":" in name else None, options, takes_any)


def _binds_options(kind: str, found: partial[Any]) -> bool:
    """Check whether a partial binds options alone; reject one that binds what its function does not accept."""
    function = _component(kind, built_in_name(found.func) or object_name(found.func), found.func)
    names = {*positional(found.func), *(option.name for option in function.options)}
    unknown = [] if function.takes_any else [bound for bound in found.keywords if bound not in names]
    if unknown:
        raise UserError(f"{KINDS[kind].key} is given as a partial: {function.unknown(unknown[0])}")
    return all(function.takes_any or function.option(bound) is not None for bound in found.keywords)


def _source(found: Any) -> Path | None:
    module = sys.modules.get(object_name(found).partition(":")[0])
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path and Path(path).suffix == ".py" and Path(path).is_file() else None


def _unknown_name(kind: str, choice: str, names: list[str]) -> str:
    near = get_close_matches(choice, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    module, dot, name = choice.rpartition(".")
    if dot and module.isidentifier() and name.isidentifier():
        hint = f"did you mean {f'{module}:{name}'!r}? "
    listed = f"choose one of {', '.join(names)}, or your own" if names else "choose your own"
    return f'{KINDS[kind].key} = {choice!r} is unknown: {hint}{listed} "package.module:object"'
