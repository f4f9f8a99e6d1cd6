"""Every key of the configuration changes something of a run, and what it says it does: settings are not only read."""

from __future__ import annotations

import pytest

from fedmpi import Config, components
from fedmpi.common.registry import KINDS
from fedmpi.config import key_descriptions
from tests.keys.entries import KEYS, OF_DATA, OF_RANKS, OF_STALLS, seen_pair
from tests.keys.watched import Watcher, first_difference


def keys() -> set[str]:
    """Return every key of the configuration without the options of components, which `test_every_option` tries."""
    options = {
        f"{kind.key}.{o.name}" for kind in KINDS.values() for part in components(kind.name) for o in part.options
    }
    rows = {key for key, *_ in key_descriptions() if not key.startswith("[") and " = " not in key}
    tables = {name for name, field in Config.model_fields.items() if not (isinstance(field.annotation, type))}
    links = {f"devices.{link}{key}" for link in ("upload", "download") for key in ("", ".rates", ".shares")}
    return (rows - options - links - {"devices.download.sigma", "samples.size"}) | tables | {"model.lora"}


def test_every_key_has_an_entry():
    assert sorted(keys()) == sorted([*KEYS, *OF_RANKS, *OF_STALLS, *OF_DATA])


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_a_run_as_it_says(name: str, watcher: Watcher):
    key = KEYS[name]
    one, other = seen_pair(watcher, name, key)
    assert not one.refusal, one.refusal
    assert first_difference(one, other) == key.first, other.refusal
    assert key.promise is None or key.promise(one, other)
