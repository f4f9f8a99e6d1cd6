"""Calls of parts: whatever goes wrong inside names the part and its line, and global generators stay as they were."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

import numpy as np

from fedmpi.common.errors import ClientFailure, PartFailure, UserError, raised
from fedmpi.common.registry import Part


@contextmanager
def calling(part: Part, round: int | None = None, client: int | None = None) -> Iterator[None]:
    """Around every call of a part.

    Global generators of random, numpy and torch are as before once a foreign part has been called, whatever it drew.

    Parameters
    ----------
    part : Part
    round, client : int, optional
        What it is called for, for the message.

    Raises
    ------
    PartFailure
        Instead of any exception inside, SystemExit too, but UserError, PartFailure and ClientFailure, which pass as
        they are.
    """
    with kept_generators() if part.foreign else nullcontext(), naming(part, round, client):
        yield


@contextmanager
def naming(part: Part, round: int | None = None, client: int | None = None) -> Iterator[None]:
    """`calling` without the care for generators: for calls too many to copy their states each time."""
    try:
        yield
    except (UserError, PartFailure, ClientFailure, KeyboardInterrupt):
        raise
    except BaseException as cause:  # sys.exit() in a part must not end the run as if it were done
        raise _failure(part, cause, round, client) from cause


@contextmanager
def during(round: int) -> Iterator[None]:
    """Within: the failure of a part names the round."""
    try:
        yield
    except PartFailure as failure:
        raise failure.during(round) from failure.__cause__


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the global generators of random, numpy and torch back to where they stood."""
    restore = _generators()
    try:
        yield
    finally:
        restore()


def refuse_result(part: Part, problem: str, round: int | None = None, client: int | None = None) -> PartFailure:
    """The failure of a part that returned what nobody can use.

    Parameters
    ----------
    part : Part
    problem : str
        What it returned and what is wanted, e.g. "returned a list: return a fedmpi.Cohort".
    round, client : int, optional
    """
    where = str(part.source) if part.source else ""
    return PartFailure(part.kind, part.name, problem, where, round=round, client=client)


def _failure(part: Part, cause: BaseException, round: int | None, client: int | None) -> PartFailure:
    lines = _own_lines(part, cause.__traceback__)
    where = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(part.source or "")
    told = "".join(traceback.format_list(lines)) if lines else ""
    return PartFailure(part.kind, part.name, raised(cause), where, told.rstrip(), round, client)


def _own_lines(part: Part, trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The traceback from the part's own first line on, the caller's left out."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename != __file__]
    if part.source is None:
        return frames[1:]
    for place, frame in enumerate(frames):
        if Path(frame.filename).resolve() == part.source:
            return frames[place:]
    return frames[1:]


def _generators() -> Callable[[], None]:
    """What puts the global generators back into their present states."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch = sys.modules.get("torch")
    drawn = torch.default_generator.get_state() if torch is not None else None
    on_device = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        if torch is not None and drawn is not None:
            torch.default_generator.set_state(drawn)
        if torch is not None and on_device is not None:
            torch.cuda.set_rng_state_all(on_device)

    return restore
