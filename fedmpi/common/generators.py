"""Global generators of random, numpy and torch: reading, comparing, seeding and restoring their states."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

GeneratorStates = dict[str, object]


def generator_states() -> GeneratorStates:
    """Return the states of the global generators."""
    states: GeneratorStates = {"random": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.default_generator.get_state()
        if torch.cuda.is_initialized():
            states["torch on the GPU"] = torch.cuda.get_rng_state_all()
    return states


_SET: dict[str, Callable[[object], object]] = {
    "random": lambda state: random.setstate(state),  # type: ignore[arg-type]
    "numpy": lambda state: np.random.set_state(state),  # type: ignore[arg-type]  # noqa: NPY002
    "torch": lambda state: sys.modules["torch"].default_generator.set_state(state),
    "torch on the GPU": lambda state: sys.modules["torch"].cuda.set_rng_state_all(state),
}


def put_back(states: GeneratorStates) -> None:
    """Restore the global generators to these states."""
    for name, state in states.items():
        _SET[name](state)


def drawn_from(before: GeneratorStates) -> list[str]:
    """Return the generators that were drawn from, or seeded, since these states."""
    after = generator_states()
    return [name for name in before if name in after and not _equal(before[name], after[name])]


def seed_generators(seed: int) -> None:
    """Seed the global generators; 0 <= seed < 2**63."""
    import torch

    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global generators of random, numpy and torch after the context."""
    states = generator_states()
    try:
        yield
    finally:
        put_back(states)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))  # type: ignore[arg-type]
    if hasattr(one, "equal"):
        return bool(one.equal(other))
    return one == other
