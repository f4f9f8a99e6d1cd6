"""Tables of keys, and options of components: names, types, conditions, defaults and descriptions.

An option is a keyword-only parameter of a function or constructor. The options of a component form a table, which
pydantic checks as it checks the tables of the configuration.
"""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    PydanticUserError,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

NUMBERS = (int, float, np.number, np.bool_)


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable, docstrings describe the fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False, arbitrary_types_allowed=True
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        """Reject true for 1, and 1 for true."""
        found = validated(value)
        truths = [isinstance(one, bool | np.bool_) for one in (value, found) if isinstance(one, NUMBERS)]
        if truths == [True, False]:
            raise ValueError("give a number, not true or false")
        if truths == [False, True]:
            raise ValueError("give true or false, not a number")
        return found


OWN = "package.module:object"
"""Custom component, among the values of an `only_with`."""


@dataclass(frozen=True)
class Condition:
    """Condition on another key, without which a key has no effect; an annotation of the key's type."""

    key: str  # its full name
    values: tuple[Any, ...]
    included: bool = True  # True if the other key must have one of the values, False if none of them

    def holds(self, value: Any) -> bool:
        """Check the condition for a value of the other key."""
        value = getattr(value, "name", value)
        own = isinstance(value, str) and ":" in value
        return any(own if known is OWN else known == value for known in self.values) is self.included

    def __str__(self) -> str:
        if self.values == (None,):
            return self.key
        alternatives = " or ".join("one of your own" if value is OWN else in_toml(value) for value in self.values)
        return f"{self.key} {'=' if self.included else 'other than'} {alternatives}"


def only_with(key: str, *values: Any) -> Condition:
    """Return the condition that another key has one of these values."""
    return Condition(key, values)


def not_with(key: str, *values: Any) -> Condition:
    """Return the condition that another key has none of these values."""
    return Condition(key, values, included=False)


def in_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def location(error: ErrorDetails, given: Any) -> list[str]:
    """Return the keys that lead to the value of an error, without the tags that pydantic adds for unions."""
    found: list[str] = []
    for step in map(str, error["loc"]):
        if isinstance(given, Mapping) and step in given:
            found.append(step)
            given = given[step]
    if error["type"] == "missing":
        found.append(str(error["loc"][-1]))
    return found


def tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the tables that a type allows: one, or its variants; none for a value or a component."""
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            yield annotation
    elif typing.get_origin(annotation) is not tuple:
        for inner in typing.get_args(annotation):
            yield from tables_in(inner)


def names_of(table: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a variant; () if the table is the only one."""
    return typing.get_args(table.model_fields["name"].annotation) if "name" in table.model_fields else ()


def names_with(annotation: Any, key: str) -> str:
    """Return the names of the variants that have a key, in words; "" if none has it."""
    found = [
        name for table in dict.fromkeys(tables_in(annotation)) if key in table.model_fields for name in names_of(table)
    ]
    return " or ".join(f'"{name}"' for name in found)


Options = Mapping[str, FieldInfo]
"""Options of a component by name, as fields of a table."""


def options_table(options: Options, base: type[Table], custom: bool) -> type[Table]:
    """Return a table of options and of the keys of a base.

    An option of a custom component whose type pydantic rejects takes anything.
    """
    if not options:
        return base
    fields: dict[str, Any] = {}
    for name, field in options.items():
        known = not custom or _is_type(Annotated[field.annotation, field])
        fields[name] = (field.annotation, field) if known else (Any, field.default)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # an option may have the name of a method
        return create_model("Options", __base__=_without_source(base), **fields)


@cache
def _without_source(base: type[Table]) -> type[Table]:
    """Return a base for tables made at run time: pydantic would search the source of each for docstrings, for 40 ms."""

    class Made(base):  # type: ignore[misc, valid-type]
        model_config = ConfigDict(use_attribute_docstrings=False)

    return Made


def _is_type(annotation: Any) -> bool:
    try:
        TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, NameError, TypeError):
        return False
    return True


def reason_of(error: ErrorDetails) -> str:
    """Return the words of an error about a value."""
    if error["type"] == "union_tag_invalid":
        return f"choose one of {error['ctx']['expected_tags']}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


def conditions_of(field: FieldInfo | None) -> list[Condition]:
    """Return the conditions without which a key has no effect."""
    return [] if field is None else [item for item in field.metadata if isinstance(item, Condition)]


def _parameters(found: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(found).parameters.values())
    except Exception:  # callables in C have no signature, others fail: the call itself reports that
        return []


def options_of(found: Any, positional: bool = False) -> dict[str, FieldInfo]:
    """Return the options of a function or class: its keyword-only parameters, or all but the first."""
    if not callable(found):
        return {}
    types, docs, options = _annotations(found), parameter_docs(found), {}
    kinds = (inspect.Parameter.KEYWORD_ONLY, *[inspect.Parameter.POSITIONAL_OR_KEYWORD] * positional)
    for p in _parameters(found)[1 if positional else 0 :]:
        if p.kind in kinds:
            default = PydanticUndefined if p.default is p.empty else p.default
            options[p.name] = FieldInfo.from_annotated_attribute(types.get(p.name, Any), default)
            options[p.name].description = docs.get(p.name) or options[p.name].description or ""
    return options


def positional(found: Any) -> dict[str, bool]:
    """Return the parameters that are no options because they can be positional, each with whether it is required."""
    parameters = _parameters(found)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default is p.empty for p in parameters if p.kind in kinds}


def _annotations(found: Any) -> dict[str, Any]:
    """Return the types of the parameters as objects, without those that cannot be resolved."""
    written = found.__init__ if inspect.isclass(found) else found
    names = getattr(inspect.unwrap(written), "__globals__", {})
    types: dict[str, Any] = {}
    for name, hint in inspect.get_annotations(written).items():
        alone = SimpleNamespace(__annotations__={name: hint})
        with suppress(Exception):  # names that only a type checker knows
            types |= typing.get_type_hints(alone, globalns=names, include_extras=True)
    return types


def docstring(found: Any) -> str:
    """Return the docstring without its indentation; "" if there is none."""
    return inspect.cleandoc(getattr(found, "__doc__", None) or "")


def parameter_docs(found: Any) -> dict[str, str]:
    """Return the section "Parameters" of a NumPy docstring by name; of a class, including its constructor."""
    texts = [docstring(found)]
    if inspect.isclass(found):
        texts.append(docstring(found.__init__))
    docs: dict[str, str] = {}
    for text in texts:
        match = re.search(r"^Parameters\n-{3,}\n(.*?)(?=^\S[^\n]*\n-{3,}\n|\Z)", text, re.DOTALL | re.MULTILINE)
        names: list[str] = []
        for line in match.group(1).splitlines() if match else []:
            if line and not line.startswith(" "):
                names = [name.strip().lstrip("*") for name in line.partition(":")[0].split(",")]
            elif line.strip():
                docs |= {name: f"{docs.get(name, '')} {line.strip()}".strip() for name in names}
    return docs


def one_line(text: str | None) -> str:
    """Return a text without line breaks; "" for None."""
    return " ".join((text or "").split())


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])(?<!al\.)\s(?=\W?[A-Z])", paragraph, maxsplit=1)[0]


def type_text(annotation: Any) -> str:
    """Return a type as an author of code would write it."""
    if annotation is Any:
        return "any"
    if typing.get_origin(annotation) is typing.Annotated:
        return type_text(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[1:] == (...,):
        return f"tuple[{type_text(typing.get_args(annotation)[0])}, ...]"
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(repr(value) for value in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    if annotation.__class__.__name__ in ("UnionType", "_UnionGenericAlias", "Union"):
        return " | ".join(dict.fromkeys(type_text(inner) for inner in typing.get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and names_of(annotation):
        return " | ".join(map(repr, names_of(annotation)))
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
