"""Built-in partitions and data sets as components, listed by `fedmpi components` and checked by `fedmpi check`.

Each is a function with the signature of a custom component: (labels, clients, generator, *, options) -> the client of
every row, and (raw, *, options) -> `RawDataset`. A partition scheme that uses more than labels takes the other data of
the data set as arguments after the generator, under the names that `partition` has for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
from pydantic import Field

from data_prep.datasets import DATASETS
from data_prep.partitions import PARTITIONS, Law, LawOption, partition
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally
from fedmpi.common.options import parameter_docs
from fedmpi.common.registry import register
from fedmpi.common.types import Ints


def _register_law(name: str, law: Law) -> None:
    def owners(
        labels: Ints,
        clients: int | None,
        generator: np.random.Generator,
        known: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Ints:
        classes = int(np.max(labels, initial=0)) + 1
        drawn = partition(name, labels, classes, clients, generator, **(known or {}), **options)
        found = np.full(len(labels), -1, np.int64)
        found[drawn.rows] = np.repeat(np.arange(drawn.clients), drawn.sizes)
        return found

    entries = [f"{option.name} : {option.kind.__name__}\n    {option.help}" for option in law.options]
    options = [(o.name, _annotation(o), Parameter.empty if o.default is None else o.default) for o in law.options]
    _dress(owners, name, ("labels", "clients", "generator"), options, law.sentence, entries)
    register("partition", name, needs=law.needs)(owners)


def _register_data_set(data: DataSet) -> None:
    def read(raw: Path = Path(), **options: Any) -> RawDataset:
        return data.read(Path(raw), ReadOptions(**{**data.defaults, **options}), Tally())

    types, docs, defaults = get_type_hints(ReadOptions), parameter_docs(ReadOptions), ReadOptions()
    taken = [field.name for field in fields(ReadOptions) if field.name in data.options]
    options = [(name, types[name], data.defaults.get(name, getattr(defaults, name))) for name in taken]
    parts = " (train + test)" if "+" in data.samples else ""
    size = "data of your own" if data.samples == "yours" else f"{data.samples} samples{parts}, {data.classes} classes"
    files = f"; --raw names {data.files}" if data.files else ""
    entries = [f"{name} : any\n    {docs.get(name, '')}" for name in taken]
    _dress(read, data.name, () if data.raw == "none" else ("raw",), options, f"{size}{files}", entries)
    register("data set", data.name)(read)


def _dress(
    function: Callable[..., Any],
    name: str,
    given: tuple[str, ...],
    options: list[tuple[str, Any, Any]],
    sentence: str,
    entries: list[str],
) -> None:
    """Give a function the signature and the docstring of the component it wraps."""
    positional = [Parameter(parameter, Parameter.POSITIONAL_OR_KEYWORD) for parameter in given]
    keywords = [Parameter(option, Parameter.KEYWORD_ONLY, default=default) for option, _, default in options]
    function.__name__ = function.__qualname__ = name
    function.__annotations__ = {option: kind for option, kind, _ in options}
    function.__signature__ = Signature([*positional, *keywords])  # type: ignore[attr-defined]
    section = "".join(f"\n{entry}" for entry in entries)
    function.__doc__ = f"{sentence[:1].upper()}{sentence[1:]}." + (
        f"\n\nParameters\n----------{section}" if entries else ""
    )


def _annotation(option: LawOption) -> Any:
    if option.choices:
        return Literal[option.choices]
    return option.kind if option.low is None else Annotated[option.kind, Field(ge=option.low)]


for _name, _law in PARTITIONS.items():
    _register_law(_name, _law)
for _data in DATASETS.values():
    _register_data_set(_data)
