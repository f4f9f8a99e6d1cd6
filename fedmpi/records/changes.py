"""What a run may change when it goes on: how long it lasts, how it is watched and where it is computed.

Whatever else differs from the folder's config.toml is refused, key by key. What may differ and does is noted at the
head of config.toml, which then says the new.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.config import Config, config_toml
from fedmpi.config.writing import differences
from fedmpi.records.moved import SHARDS, digest_of, recorded_digest

MAY_CHANGE = ("rounds", "data.verify", "evaluation.", "checkpoint.", "cluster.", "logging.")
NOT_WITH_THESE = {
    "logging.diagnostics": "what it counts begins with round 0",
    "evaluation.clients": "how often clients were used is counted from round 0",
    "evaluation.fine_tune": "all rows about clients tell the same",
}
COSINE = "with local.lr_schedule = cosine the rates of all rounds follow from it"
MARK = "# changed before round "


@dataclass(frozen=True)
class Changes:
    """What differs between a folder's config.toml and the configuration that its run goes on with."""

    earlier: tuple[str, ...] = ()  # The notes of earlier changes
    keys: tuple[tuple[str, str, str], ...] = ()  # (key, old, new): What is new now

    def noted(self, round: int) -> tuple[str, ...]:
        """One note a change, the earlier ones first; `round` is the first to run with what is new now."""
        return (*self.earlier, *(f"{MARK}{round}: {key}: {old} -> {new}" for key, old, new in self.keys))

    def text(self, config: Config, round: int) -> bytes:
        """config.toml: the notes, and what the run goes on with."""
        head = "".join(note + "\n" for note in self.noted(round))
        return (head + config_toml(config)).encode()


def changes_since(path: Path, config: Config) -> Changes:
    """What differs from the file config.toml."""
    try:
        text = read_plain(path).decode("utf-8")
        differing = differences(tomllib.loads(text), config)
    except (OSError, ValueError, RecursionError) as error:  # no file, no TOML, no UTF-8, numbers of thousands of digits
        raise UserError(f"{path} is damaged ({error}): choose another --out") from None
    refused = []
    for key, there, here in differing:
        same = key == SHARDS and recorded_digest(path.parent) == digest_of(config.data.shards) is not None
        reason = None if same else _why_not(key, config)
        if reason is not None:
            refused.append(f"{key}: {there} there, {here} here{reason}")
    if refused:
        raise UserError(
            f"{path} differs from the configuration given in what a run cannot change ({'; '.join(refused)}): resume "
            "with the same, or choose another --out"
        )
    earlier = tuple(line for line in text.splitlines() if line.startswith(MARK))
    return Changes(earlier, tuple(differing))


def _why_not(key: str, config: Config) -> str | None:
    """None where a run may go on with another value; else the reason, "" where it is plain."""
    if key in NOT_WITH_THESE:
        return f" ({NOT_WITH_THESE[key]})"
    if key == "rounds" and config.local.lr_schedule == "cosine":
        return f" ({COSINE})"
    return None if key.startswith(MAY_CHANGE) else ""
