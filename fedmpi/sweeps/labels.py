"""Names of runs, made of what differs between them: readable, stable, fit for folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedmpi.config.base import written

LONGEST = 150
"""Bytes of a name; file systems take 255."""
BY_THEMSELVES = ("preset", "data.shards", "model.name")
"""Keys whose values say enough without the key."""


def run_name(labels: Mapping[str, Any], variants: Iterable[str], short: Mapping[str, str]) -> str:
    """The name of a run: variants' names first, then the preset, other keys, and the seed last."""
    named = set(variants)
    bare = {*named, *BY_THEMSELVES}
    order = sorted(labels, key=lambda key: (key == "seed", key not in named, key != "preset"))
    pieces = [("" if key in bare else f"{short.get(key, key)}=") + _slug(labels[key]) for key in order]
    name = ",".join(pieces) or "run"
    if len(name.encode()) > LONGEST:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name.encode()[:LONGEST].decode(errors='ignore')}~{digest}"
    return name


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each key without its table, where no other key of them ends alike."""
    listed = list(dict.fromkeys(keys))
    ends = [key.rpartition(".")[2] for key in listed]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(listed, ends, strict=True)}


def labels_text(labels: Mapping[str, Any]) -> str:
    """What a run has of each thing that differs, in a line."""
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in labels.items())


def shown_value(value: Any) -> str:
    """A value as a configuration file has it, without quotes."""
    value = written(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(shown_value, value)) + "]"
    return str(value)


def _slug(value: Any) -> str:
    """A value as part of a name: letters, digits and some signs, others as -."""
    value = written(value)
    if isinstance(value, int | float):
        return shown_value(value)
    text = Path(value).as_posix() if isinstance(value, str) else shown_value(value)
    return re.sub(r"-{2,}", "-", re.sub(r"[^\w.+~-]", "-", text)).strip("-.") or "-"
