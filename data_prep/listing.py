"""What `python -m data_prep list` and the help show: the data sets and the partition laws with their options."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from data_prep.datasets.registry import DATASETS
from data_prep.partitions import PARTITIONS, Law, Option


def show_lists(console: Console) -> None:
    """Print the two tables."""
    sets = Table(title="data sets", show_lines=True)
    sets.add_column("data set", no_wrap=True)
    sets.add_column("samples (train + test)", overflow="fold")
    sets.add_column("classes", no_wrap=True)
    sets.add_column("licence", overflow="fold", ratio=2)
    sets.add_column("from where", overflow="fold", ratio=3)
    for data_set in DATASETS.values():
        origin = ": ".join(filter(None, (data_set.origin, data_set.page)))
        sets.add_row(data_set.name, data_set.samples, data_set.classes, data_set.licence, origin)
    console.print(sets)
    laws = Table(title="partitions", show_lines=True)
    laws.add_column("partition", no_wrap=True)
    laws.add_column("options", overflow="fold", ratio=2)
    laws.add_column("law", overflow="fold", ratio=1)
    for name, law in PARTITIONS.items():
        laws.add_row(name, "\n".join(describe(option) for option in law.options) or "none", law.sentence)
    console.print(laws)


def describe(option: Option) -> str:
    """One line: flag, meaning, choices, default."""
    facts = [*([" | ".join(option.choices)] if option.choices else [])]
    facts.append("required" if option.default is None else f"default {option.default}")
    return f"{flag(option.name)}: {option.help} ({'; '.join(facts)})"


def flag(name: str) -> str:
    """The option on the command line: classes_per_client is --classes-per-client."""
    return "--" + name.replace("_", "-")


def help_of_laws() -> str:
    """The partition options for `--help`, one law a line."""
    return "\n".join(f"  {name}: {_flags(law)}" for name, law in PARTITIONS.items())


def _flags(law: Law) -> str:
    return " ".join(flag(option.name) for option in law.options) or "no options"
