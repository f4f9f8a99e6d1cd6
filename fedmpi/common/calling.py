"""Calls of parts: whatever goes wrong inside names the part and its line, and global generators stay as they were."""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fedmpi.common.errors import ClientFailure, PartFailure, UserError, raised
from fedmpi.common.generators import GeneratorStates, drawn_from, generator_states, put_back
from fedmpi.common.own_code import innermost
from fedmpi.common.registry import Part

log = logging.getLogger("fedmpi")

WATCHED_CALLS = 100
"""Of a part, in which it is looked whether it draws from a global generator; afterwards that would cost too much."""

_calls: WeakKeyDictionary[Part, Counter[str]] = WeakKeyDictionary()


@contextmanager
def calling(part: Part, round: int | None = None, client: int | None = None) -> Iterator[None]:
    """Around every call of a part.

    Global generators of random, numpy and torch are as before once a foreign part has been called, whatever it drew;
    the log warns of one that draws from them.
    """
    if not part.foreign:
        with naming(part, round, client):
            yield
        return
    states = generator_states()
    try:
        with kept_settings(), naming(part, round, client):
            yield
        _warn_of_draws(part, states)
    finally:
        put_back(states)


@contextmanager
def naming(
    part: Part, round: int | None = None, client: int | None = None, *, but: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """`calling` without the care for generators: for calls too many to copy their states each time.

    `but` are further exceptions that pass as they are.
    """
    try:
        yield
    except (UserError, PartFailure, ClientFailure, KeyboardInterrupt):
        raise
    except but:
        raise
    except BaseException as cause:  # sys.exit() in a part must not end the run as if it were done
        raise failure_of(part, cause, raised(cause), round, client) from cause


@contextmanager
def during(round: int) -> Iterator[None]:
    """Within: the failure of a part names the round."""
    try:
        yield
    except PartFailure as failure:
        raise failure.during(round) from failure.__cause__


@contextmanager
def kept_settings() -> Iterator[None]:
    """Put back how numbers are made: numpy's handling of errors, torch's default type, whether it records gradients."""
    errors, torch = np.geterr(), sys.modules.get("torch")
    kept = None if torch is None else (torch.get_default_dtype(), torch.is_grad_enabled())
    try:
        yield
    finally:
        np.seterr(**errors)
        if torch is not None and kept is not None and kept != (torch.get_default_dtype(), torch.is_grad_enabled()):
            torch.set_default_dtype(kept[0])
            torch.set_grad_enabled(kept[1])


def takes(part: Part, called: Callable[..., Any], *parameters: str, method: str = "") -> None:
    """Refuse a part of the user's own that cannot be called as its kind is."""
    if not part.foreign:
        return
    wanted = ", ".join(parameters)
    name = getattr(part.object, "__name__", part.name)
    if not callable(called):
        raise UserError(
            f"{part.key} = {part.name!r} ({_definition(part)}) has no method {method}({wanted}): give it one"
        )
    try:
        inspect.signature(called).bind(*parameters)
    except ValueError:  # what is written in C may have no signature
        return
    except TypeError as error:
        form = f"def {method or '__call__'}({', '.join(('self', *parameters))})"
        if not method and not inspect.isclass(part.object):
            form = f"def {name}({', '.join((*parameters, '*, options'))})"
        raise UserError(
            f"{part.key} = {part.name!r} ({_definition(part)}) is called with {wanted or 'its options alone'}, which "
            f"{method or 'it'} does not take ({error}): write {form}"
        ) from None


def refuse_result(part: Part, problem: str, round: int | None = None, client: int | None = None) -> PartFailure:
    """The failure of a part that returned what nobody can use."""
    return PartFailure(part.kind, part.name, problem, _definition(part), round=round, client=client)


def is_complex(found: Any) -> bool:
    """Whether what a part returned are complex numbers, of which torch and NumPy would keep the real parts."""
    own = getattr(found, "is_complex", None)  # of tensors
    return bool(own()) if callable(own) else isinstance(found, complex | np.ndarray) and np.iscomplexobj(found)


def failure_of(
    part: Part, cause: BaseException, problem: str, round: int | None = None, client: int | None = None
) -> PartFailure:
    """The failure of a part inside which an exception was raised; names its line."""
    lines = _own_lines(part, cause.__traceback__)
    last = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else ""
    where = innermost(lines, part.source, part.source is None) or _definition(part) if part.foreign else last
    listing = "".join(traceback.format_list(lines)) if lines else ""
    return PartFailure(part.kind, part.name, problem, where, listing.rstrip(), round, client)


def _own_lines(part: Part, trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The traceback from the part's own first line on, the caller's left out."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename != __file__]
    if part.source is None:
        return frames[1:]
    for place, frame in enumerate(frames):
        if Path(frame.filename).resolve() == part.source:
            return frames[place:]
    return frames[1:]


def _definition(part: Part) -> str:
    """ "file:line" where the part begins; the file alone where the line is not known, "" where there is none."""
    if part.source is None:
        return ""
    found = part.object.func if isinstance(part.object, partial) else part.object
    try:
        return f"{part.source}:{max(1, inspect.getsourcelines(inspect.unwrap(found))[1])}"
    except (OSError, TypeError, ValueError):
        return str(part.source)


def _warn_of_draws(part: Part, before: GeneratorStates) -> None:
    """Log, once for a part, that it has drawn from a global generator since then."""
    seen = _calls.setdefault(part, Counter())
    if seen["calls"] >= WATCHED_CALLS:
        return
    seen["calls"] += 1
    if drawn := drawn_from(before):
        seen["calls"] = WATCHED_CALLS
        log.warning(
            "the %s %s draws from the global generator of %s, which no seed of the run sets and which is put back after"
            " each call, so that the same numbers come again: draw from the generator that it is given, or from one "
            "made of the round",
            part.kind,
            part.name,
            " and ".join(drawn),
        )
