"""What trackers are sent, and under which names: numbers in groups (test/…, train/…, clients/…, time/…), settings."""

from __future__ import annotations

import re
from typing import Any

from fedmpi.config import Config
from fedmpi.config.writing import flat_table, is_default

Record = dict[str, Any]
GROUPS = (
    ("test", r"test_(.+)"),
    ("val", r"val_(.+)"),
    ("train", r"train_(loss)"),
    (
        "train",
        r"(lr|steps|samples|update_norm|gradient_diversity|client_drift|gamma|weight_divergence|clipped_updates)",
    ),
    ("clients", r"(participants|asked|available|attackers|diverged|strata|opening|client_.+|clients_.+|inclusion_.+)"),
    ("clients", r"(samples?_us.+|group.*)"),
    ("mediators", r"(mediators|visits|hops|kl_.+)"),
    ("sizes", r"(sampling_probability|clipped_fraction|size_(?!epsilon).+)"),
    ("privacy", r"(.*epsilon.*)"),
    ("traffic", r"(bytes_.+)"),
    ("local", r"local_(.+)"),
    ("sampler", r"sampler_(.+)"),
    ("time", r"(.*seconds)"),
)
"""Group, and keys of records that belong to it; the first that fits counts, and "other" takes the rest."""
PHASES = "phase_seconds"
TARGETS = ("test/accuracy", "test/loss", "val/accuracy", "val/loss", "train/loss")
"""What settings are judged by."""


def by_group(record: Record) -> dict[str, float]:
    """The numbers of a record by grouped name; phases of the round are "time/plan", "time/train", …"""
    found = {name(key): float(value) for key, value in record.items() if key != "round" and _number(value)}
    return found | {f"time/{phase}": float(value) for phase, value in record.get(PHASES, {}).items()}


def name(key: str) -> str:
    """ "test_accuracy" as "test/accuracy"."""
    for group, pattern in GROUPS:
        if match := re.fullmatch(pattern, key):
            return f"{group}/{match[1]}"
    return f"other/{key}"


def settings(config: Config) -> dict[str, bool | int | float | str]:
    """Seed, preset, and every key that is not at its default, by name."""
    chosen = {key: value for key, value in flat_table(config).items() if not is_default(config, key)}
    values = {"seed": config.seed, **({"preset": config.preset} if config.preset else {}), **chosen}
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
