"""Reference pages made from the program: commands, keys of a configuration, components, options of data sets.

Links from pages to Markdown files of the repository outside docs lead to the page that includes them.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from data_prep.__main__ import flag
from data_prep.raw import READING
from fedmpi import components
from fedmpi.cli import app as program
from fedmpi.config import key_descriptions

INCLUDED = {
    "jobs/README": "howto/slurm",
    "jobs/experiments/README": "site/experiments",
    "benchmarks/README": "dev/benchmarks",
    "CHANGELOG": "site/changelog",
    "CONTRIBUTING": "dev/contributing",
}
"""Pages of the site that hold a file from outside docs."""


class Made(SphinxDirective, ABC):
    """A directive whose content is Markdown that `lines` makes."""

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield lines of Markdown."""

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.lines()).splitlines()
        self.env.note_dependency(inspect.getfile(type(self)))
        return self.parse_text_to_nodes(StringList(text, source=self.name), allow_section_headings=True)


class Commands(Made):
    """Every command: what it does, its arguments and options, an example."""

    def lines(self) -> Iterator[str]:
        group = typer.main.get_command(program)
        for name, command in sorted(group.commands.items()):
            words, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
            yield from (f"## fedmpi {name}", "", words.strip(), "")
            if example:
                yield from ("```sh", " ".join(example.split()), "```", "")
            options = [(_written(one), getattr(one, "help", "") or "") for one in command.params if one.name != "help"]
            if options:
                yield from ("| | |", "|---|---|", *(f"| {what} | {_cell(why)} |" for what, why in options), "")


class Keys(Made):
    """Every key of a configuration with its default and meaning."""

    def lines(self) -> Iterator[str]:
        head = ("", "| key | default | |", "|---|---|---|")
        yield from ("## At the top", *head)
        for key, default, description in key_descriptions():
            if key.startswith("["):
                yield from ("", f"## `{key}`", "", description, *head)
            else:
                yield f"| `{key}` | {f'`{_cell(default)}`' if default else ''} | {_cell(description)} |"


class DataOptions(Made):
    """Every option of the data sets."""

    def lines(self) -> Iterator[str]:
        yield from ("| option | meaning |", "|---|---|")
        for name, field in READING.items():
            yield f"| `{flag(name)}` | {_cell(field.description or '')} |"


class PartitionOptions(Made):
    """Every option of the partitions."""

    def lines(self) -> Iterator[str]:
        yield from ("| partition | option | default | meaning |", "|---|---|---|---|")
        for part in components("partition"):
            for name, field in part.fields.items():
                yield f"| `{part.name}` | `{flag(name)}` | {_default(field)} | {_cell(field.description or '')} |"


class Components(Made):
    """Every built-in component with its options."""

    def lines(self) -> Iterator[str]:
        found = components()
        for kind in dict.fromkeys(part.kind for part in found):
            yield from ("", f"## {kind}", "", "| name | | options |", "|---|---|---|")
            for part in found:
                if part.kind == kind:
                    options = ", ".join(f"`{name}` = {_default(field)}" for name, field in part.own.items())
                    yield f"| `{part.name}` | {_cell(part.title)} | {_cell(options)} |"


def _written(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts) if parameter.param_type_name == "option" else ""
    return f"{names} {f'`{parameter.metavar}`' if parameter.metavar else ''}".strip()


def _default(field: Any) -> str:
    return "required" if field.is_required() else f"`{field.default!r}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _read(app: Any, page: str, content: list[str]) -> None:
    content[0] = _led_inside(content[0], Path(app.srcdir, page).parent, Path(app.srcdir))


def _included(app: Any, path: Path, page: str, content: list[str]) -> None:
    content[0] = _led_inside(content[0], Path(app.srcdir, path).parent, Path(app.srcdir))


def _led_inside(text: str, place: Path, docs: Path) -> str:
    """Return Markdown whose links to pages, and to files that a page includes, lead to those pages.

    Parameters
    ----------
    text : str
    place, docs : Path
        The folders of the text's file, and of the site's pages.
    """

    def led(found: re.Match[str]) -> str:
        file = (place / found[1]).resolve()
        if not file.is_relative_to(docs.parent):
            return found[0]
        name = str(file.relative_to(docs.parent).with_suffix(""))
        page = INCLUDED.get(name, name.removeprefix("docs/") if name.startswith("docs/") else None)
        return found[0] if page is None else f"](/{page}.md{found[2]})"

    return re.sub(r"\]\(([^)#\s:]+\.md)((?:#[^)]*)?)\)", led, text)


def setup(app: Any) -> dict[str, bool]:
    """The directives, and links out of docs."""
    directives: dict[str, type[Made]] = {"commands": Commands, "keys": Keys, "components": Components}
    directives |= {"data-options": DataOptions, "partition-options": PartitionOptions}
    for name, made in directives.items():
        app.add_directive(f"fedmpi-{name}", made)
    app.connect("source-read", _read)
    app.connect("include-read", _included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
