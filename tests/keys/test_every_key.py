"""Every key of the configuration changes something of a run, and what it says it does: settings are not only read."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from fedmpi import Config
from tests.keys.entries import KEYS, OF_DATA, OF_RANKS, OF_STALLS, seen_pair
from tests.keys.watched import Watcher, first_difference


def keys() -> dict[str, object]:
    """Every key of the configuration with its type, from the tables themselves."""
    found: dict[str, object] = {}
    for name, field in Config.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            found |= {f"{name}.{key}": inner.annotation for key, inner in table.model_fields.items()}
        else:
            found[name] = table
    return found


def test_every_key_has_an_entry():
    assert sorted(keys()) == sorted([*KEYS, *OF_RANKS, *OF_STALLS, *OF_DATA])


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_a_run_as_it_says(name: str, watcher: Watcher):
    key = KEYS[name]
    one, other = seen_pair(watcher, name, key)
    assert not one.refusal, one.refusal
    assert first_difference(one, other) == key.first, other.refusal
    assert key.promise is None or key.promise(one, other)
