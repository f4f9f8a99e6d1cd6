"""SIGINT and SIGTERM end a preparation by unwinding it, so that no half file stays behind.

The state is the process's, as signals are.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


def install() -> None:
    """Turn the signals into `KeyboardInterrupt`; one that the parent had ignored stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def check() -> None:
    """Raise `KeyboardInterrupt` again if it was lost: Python drops what a weak reference's callback raises."""
    if _received:
        raise KeyboardInterrupt


def exit_code() -> int:
    """The code of a process that a signal ended."""
    return 128 + (_received[0] if _received else int(signal.SIGINT))
