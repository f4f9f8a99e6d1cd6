"""The rows that a rank drew for its participants in a round: what `Trainer` hands to the engines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SampledRows:
    """The sampled rows of a rank's participants, participants without any left out.

    Attributes
    ----------
    members : int64 (q,)
        Places in the cohort of those that have rows.
    counts : int64 (q,)
        How many rows each has, at least one.
    rows : int64 (r,)
        Local rows, participant after participant.
    """

    members: np.ndarray
    counts: np.ndarray
    rows: np.ndarray

    @property
    def largest(self) -> int:
        """Most rows of one participant."""
        return int(self.counts.max(initial=0))

    def per_client(self) -> list[np.ndarray]:
        """The rows of each participant, views of `rows`."""
        ends = np.cumsum(self.counts).tolist()
        return [self.rows[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def below(self, limits: np.ndarray) -> np.ndarray:
        """How many rows of each participant lie below its limit (q,); int64 (q,)."""
        rows = self.rows < np.repeat(limits, self.counts)
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        return np.bincount(owners, weights=rows, minlength=len(self.counts)).astype(np.int64)
