"""Where a forward pass that is being followed stands, and why it cannot be followed further: for messages."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import fx

from fedmpi.common.errors import raised
from fedmpi.models import dropout_calls

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent), dropout_calls.__file__


def line() -> str:
    """The line of the forward pass that is being followed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return "?"
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def where(error: BaseException) -> str:
    """The line of the forward pass that raised an error, followed by a colon; empty where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""


def why(error: BaseException) -> str:
    """What an error says about a forward pass that is followed."""
    if "cannot assign" in str(error):  # a value of the samples to a parameter or buffer
        return "it keeps something from one call to the next"
    if isinstance(error, fx.proxy.TraceError) or "Proxy" in str(error):
        return "what happens depends on the samples' values or on how many they are"
    return raised(error)
