"""Random streams: Philox generators keyed by (seed, purpose, round, client).

Random numbers belong to clients and rounds, never to ranks or processes. The stream of a client in a round gives the
same numbers for any number of ranks. Nothing in fedmpi draws from a global generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """Purpose of a stream; streams of two purposes never overlap. Values never change, so that runs can be repeated."""

    MODEL_INIT = 0
    COHORT = 1
    SAMPLES = 2
    BATCH_ORDER = 3
    DROPOUT = 4
    SIZE_ANSWER = 5
    ALLOCATION = 6
    STRATUM_DRAW = 7
    CLUSTERING = 8
    PROBE = 9
    AUGMENT_COPIES = 10
    AUGMENT_WARP = 11
    SCHEDULE = 12
    AVAILABILITY = 13
    DEVICE = 14
    DP_NOISE = 15
    MODULE = 16
    PROJECTION = 17
    TRANSPORT = 18
    PARTITION = 19
    ATTACK = 20
    ROWS = 21
    CLIENTS_VIEWED = 22
    EVALUATION = 23
    CLIENT_EVALUATION = 24
    ALGORITHM = 25
    ALGORITHM_SERVER = 26
    ALGORITHM_START = 27
    SKETCH = 28
    EPOCH = 29


_philox = np.random.Philox(0)
_FRESH: Any = {**_philox.state, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}


def _words(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


class _Unmade:
    """Generator that is made at the first use of one of its methods, which costs nothing before."""

    def __init__(self, make: Callable[[], np.random.Generator]):
        self._make = make

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() takes it for a generator
        return np.random.Generator

    @cached_property
    def _made(self) -> np.random.Generator:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


@dataclass(frozen=True)
class Streams:
    """All random streams of one run."""

    seed: int  # seed of the run, 0 <= seed < 2**64

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"the seed must lie in [0, 2**64), not {self.seed}")

    def generator(self, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
        """Return the generator of one (purpose, round, client).

        The key of the counter-based Philox generator (Salmon et al. 2011) is (seed, purpose), the upper half of its
        counter (client, round): two streams could only meet after 2**128 draws.
        """
        bits = np.random.Philox(key=_words(self.seed, int(purpose)), counter=_words(0, 0, client, round))
        return np.random.Generator(bits)

    def later(self, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
        """Return the generator of one (purpose, round, client), which is made only if it is used."""
        return _Unmade(lambda: self.generator(purpose, round, client))  # type: ignore[return-value]

    def seed64(self, purpose: Purpose, round: int = 0, client: int = 0) -> int:
        """Return a 63-bit seed from a stream, for libraries that need a number instead of a generator."""
        words = {"counter": _words(0, 0, client, round), "key": _words(self.seed, int(purpose))}
        _philox.state = _FRESH | {"state": words}  # a new one would read entropy from the system first
        return int(_philox.random_raw()) >> 1
