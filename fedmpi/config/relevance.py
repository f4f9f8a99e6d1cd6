"""Which keys mean something under the chosen values.

An option means something with the parts that have it; any other key with the conditions in its annotation.
"""

from __future__ import annotations

from functools import cache

from fedmpi.config.base import Condition
from fedmpi.config.choices import condition, means_something
from fedmpi.config.keys import tables_by_name
from fedmpi.config.tables import ConfigTables


@cache
def conditions() -> dict[str, tuple[Condition, ...]]:
    """The conditions of every key that has some, the keys in them with their tables."""
    found: dict[str, tuple[Condition, ...]] = {}
    for name, table in tables_by_name().items():
        for key, field in table.model_fields.items():
            own = [item for item in field.metadata if isinstance(item, Condition)]
            if own:
                found[f"{name}.{key}"] = tuple(item.within(name) for item in own)
    return found


def why_meaningless(config: ConfigTables, key: str) -> str | None:
    """What would have to be chosen for a key to mean something, in words; None where it does already."""
    table, _, name = key.partition(".")
    if name and not means_something(config, table, name):
        return condition(table, name)
    missing = [str(wanted) for wanted in conditions().get(key, ()) if not _holds(config, wanted)]
    return " and ".join(missing) or None


def _holds(config: ConfigTables, wanted: Condition) -> bool:
    """Whether a condition holds, or is about an option that the chosen parts do not have."""
    table, _, name = wanted.key.partition(".")
    return wanted.holds(getattr(getattr(config, table), name)) or not means_something(config, table, name)
