"""Available components, as `fedmpi components` lists them: kinds, names, options with their defaults, sources."""

from __future__ import annotations

import inspect

from fedmpi.common.options import REQUIRED, Option
from fedmpi.common.registry import KINDS, Component, components, describe, known_kind, resolve
from fedmpi.common.terminal import paragraph


def list_components(kind: str | None) -> None:
    """Print the built-in components of a kind, or of all kinds."""
    for name in [known_kind(kind)] if kind is not None else KINDS:
        found = components(name)
        if found:
            print(f"{name}  ({KINDS[name].key})")
        for part in found:
            print(paragraph(part.title, f"  {part.name:<20} "))
            for option in (*part.options, *part.service_options):
                print(paragraph(_line(option), "      ", " " * 10))
            print(paragraph(_source(part), "    source: "))
        if found:
            print()


def show_component(choice: str, kind: str | None) -> None:
    """Print one component, built-in or custom."""
    part = describe(choice) if kind is None else resolve(known_kind(kind), choice)
    print(paragraph(f"{part.kind}, chosen by {part.key}", f"{part.name}  "))
    if part.title:
        print(paragraph(part.title, "  "))
    for option in (*part.options, *part.service_options):
        print(paragraph(_line(option, KINDS[part.kind].option_key(option.name)), "  ", " " * 6))
    if part.takes_any:
        print("  options of any name")
    for mark, value in part.marks.items():
        if value not in ((), None):
            print(paragraph(f"{mark} = {', '.join(value) if isinstance(value, tuple) else value}", "  "))
    print(paragraph(_source(part), "  source: "))
    if part.foreign:
        print(f"  sha256: {part.digest}")


def _line(option: Option, key: str = "") -> str:
    value = getattr(option.default, "name", option.default)  # the name of a component
    default = "required" if value is REQUIRED else f"default: {value!r}"
    return f"{key or option.name} ({option.type}, {default})  {option.doc}".rstrip()


def _source(part: Component) -> str:
    if part.source is not None:
        return str(part.source)
    return str(getattr(inspect.unwrap(part.object), "__module__", "?"))
