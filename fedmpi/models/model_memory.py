"""Memory that a model takes: one too large is refused while it is built, before its values are allocated; where a
device runs out of memory, less is done at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fedmpi.cluster.free_memory import address_space
from fedmpi.common.errors import UserError

log = logging.getLogger("fedmpi")

VECTORS = 6
"""Vectors of a model's length that a rank holds at the least when it trains on the processor: the module's own values,
those at the start, the global model, the sum's slot, a client's values and their gradient. Measured: 11 and more."""
VECTORS_BESIDE_A_DEVICE = 2
"""Of these in the host's memory where a device trains: the module as it is built, the sum's slot."""
LOOKED_AT = 1 << 20
"""Bytes asked for, after which it is looked at how much the process has grown."""
SHAPED = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


class NoRoom(UserError):
    """There is less memory than what is to be done takes at the least."""


class BuiltWithin(TorchFunctionMode):
    """Within: making a new tensor raises `NoRoom` where what is built could not be trained in `room` bytes.

    Only calls that name the shape of what they make are seen (torch.empty, as in every layer of torch.nn, zeros, ones,
    full, rand, randn). What such a tensor would take is known before it is made; a process that touches more memory
    than there is would be killed without a word.

    Parameters
    ----------
    room : int
        Bytes.
    what : str
        What is built, in words, for the refusal.
    vectors : int
        How often training will hold what is built, all that the process grows by until then.
    """

    def __init__(self, room: int, what: str, vectors: int = 1):
        super().__init__()
        self._room, self._what, self._vectors = room, what, vectors
        self._start, self._asked = address_space(), 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in SHAPED:
            self._look(asked_bytes(args, kwargs))
        return func(*args, **kwargs)

    def _look(self, asked: int) -> None:
        self._asked += asked
        if self._asked < LOOKED_AT:
            return
        self._asked = 0
        needed = max(0, address_space() - self._start) + asked
        if needed * self._vectors > self._room:
            raise too_large(self._what, needed, self._vectors, self._room)


def too_large(what: str, size: int, vectors: int, room: int) -> NoRoom:
    """The refusal of a model of at least `size` bytes, held `vectors` times."""
    held = f", held {vectors} times in training" if vectors > 1 else ""
    return NoRoom(
        f"{what}: at least {shown_bytes(size)} of memory{held}, but there is room for {shown_bytes(room)} on a rank: "
        "choose a smaller model, or fewer ranks on a node"
    )


def asked_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes of the tensor that a call of one of `SHAPED` makes; 0 on other devices, and where torch will refuse it."""
    try:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
            return 0
        named = kwargs["size"] if "size" in kwargs else args[0] if isinstance(args[0], (tuple, list)) else args
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return int(math.prod(int(length) for length in named)) * int(dtype.itemsize)
    except (TypeError, ValueError, OverflowError, IndexError, RuntimeError, AttributeError):
        return 0


def shown_bytes(count: float) -> str:
    """A number of bytes in the unit that suits it, as "12.8 GB"."""
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} EB"


def ran_out(error: BaseException) -> bool:
    """Whether this is, or was caused by, a device without memory for what was asked of it."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def halved(count: int, what: str) -> int:
    """Half as many at once, at least one, and said so; what torch keeps for later use is given back to the device.

    Parameters
    ----------
    count : int
        How many were too many.
    what : str
        Of what, in words.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    fewer = max(1, count // 2)
    log.warning("out of memory on the device with %d %s at once: goes on with %d", count, what, fewer)
    return fewer
