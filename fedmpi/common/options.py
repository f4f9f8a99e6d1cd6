"""Options of a component: the keyword-only parameters of a function or constructor, with types, defaults and docs."""

from __future__ import annotations

import inspect
import re
import typing
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from fedmpi.common.truth_values import mistaken


class _Required:
    """Default of an option that must be set."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class Option:
    """One option of a component: a keyword-only parameter of its function or constructor."""

    name: str
    default: Any = REQUIRED  # `REQUIRED` if there is none
    annotation: Any = Any  # type of its values; `Any` if its author wrote none
    doc: str = ""  # description in the docstring's section "Parameters", on one line; "" if there is none

    @property
    def type(self) -> str:
        """Return the type as its author would write it."""
        return _type_text(self.annotation)

    def converted(self, value: Any) -> Any:
        """Return the value as the component receives it: 1 as 1.0 for a float, a list as a tuple."""
        if reason := mistaken(self.annotation, value):
            raise ValueError(reason)
        if self._adapter is None:
            return value
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(error.errors(include_url=False)[0]["msg"]) from None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        """Return the converter of values; None if the annotation is no type."""
        try:
            return TypeAdapter(self.annotation, config=ConfigDict(arbitrary_types_allowed=True))
        except (PydanticUserError, NameError, TypeError):
            return None


def options_of(found: Any, positional: bool = False) -> tuple[tuple[Option, ...], bool]:
    """Return the options of a function or class, and whether it accepts others of any name (**options)."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except Exception:  # callables in C have no signature, others fail: the call itself reports that
        return (), True
    types = _annotations(found)
    docs = parameter_docs(found)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if positional:
        chosen = [p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    else:
        chosen = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    options = tuple(
        Option(
            p.name,
            REQUIRED if p.default is p.empty else p.default,
            types.get(p.name, Any),
            docs.get(p.name, ""),
        )
        for p in chosen
    )
    return options, takes_any


def positional(found: Any) -> dict[str, bool]:
    """Return the parameters that are no options because they can be positional, each with whether it is required."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except Exception:  # as in `options_of`
        return {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default is p.empty for p in parameters if p.kind in kinds}


def _annotations(found: Any) -> dict[str, Any]:
    """Return the types of the parameters as objects, without those that cannot be resolved."""
    found = found.func if isinstance(found, partial) else found
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
    found = found.func if isinstance(found, partial) else found
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


def first_sentence(text: str) -> str:
    """Return the first sentence of a text, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])(?<!al\.)\s(?=\W?[A-Z])", paragraph, maxsplit=1)[0]


def _type_text(annotation: Any) -> str:
    if annotation is Any:
        return "any"
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_text(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(repr(value) for value in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    if annotation.__class__.__name__ in ("UnionType", "_UnionGenericAlias", "Union"):
        return " | ".join(_type_text(inner) for inner in typing.get_args(annotation))
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
