"""Calls of components: failures name the component and its line. The global generators of random, numpy and torch."""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpi.common.errors import ClientFailure, ComponentFailure, UserError, raised
from fedmpi.common.imports import user_frames
from fedmpi.common.registry import Component
from fedmpi.common.types import AnyArray

if TYPE_CHECKING:
    from torch import Tensor

GeneratorStates = dict[str, Any]


@contextmanager
def calling(part: Component, round: int | None = None, client: int | None = None) -> Iterator[None]:
    """Turn an exception in a call of a component into a ComponentFailure."""
    try:
        yield
    except (UserError, ComponentFailure, ClientFailure, KeyboardInterrupt):
        raise
    except BaseException as cause:  # a sys.exit() in a component must not end the run as if it were done
        raise failure_of(part, cause, raised(cause), round, client) from cause


@contextmanager
def during(round: int) -> Iterator[None]:
    """Add the round to failures of a component or a client within the context."""
    try:
        yield
    except (ComponentFailure, ClientFailure) as failure:
        raise failure.during(round) from failure.__cause__


def takes(part: Component, called: Any, *parameters: str, method: str = "", offered: Sequence[str] = ()) -> set[str]:
    """Reject a custom component with a signature that its kind does not allow.

    Return the `offered` parameters that it takes; these are optional.
    """
    try:
        named = set(offered) & set(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # no function, or one written in C, which may have no signature
        named = set()
    if not part.foreign:
        return named
    wanted = ", ".join([*parameters, *sorted(named)])
    about = f"{part.key} = {part.name!r} ({_definition(part)})"
    if not callable(called):
        raise UserError(f"{about} has no method {method}({wanted}). Give it one")
    try:
        inspect.signature(called).bind(*parameters, **dict.fromkeys(named))
    except ValueError:
        pass
    except TypeError as error:
        given = wanted or "its options alone"
        raise UserError(f"{about} is called with {given}, which {method or 'it'} does not take ({error})") from None
    return named


def refuse_result(
    part: Component, problem: str, round: int | None = None, client: int | None = None
) -> ComponentFailure:
    """Build the failure of a component that returned an invalid result."""
    return ComponentFailure(part.kind, part.name, problem, _definition(part), round=round, client=client)


def result_array(
    part: Component,
    found: Any,
    shape: tuple[int, ...] | None,
    what: str,
    round: int | None = None,
    client: int | None = None,
    *,
    whole: bool = False,
) -> AnyArray:
    """Return a component's result as finite float64 numbers, or as int64 ones, after checks of type and shape.

    Without a shape it is any vector, also an empty one of another type.
    """
    with calling(part, round, client):  # objects that cannot be converted to an array
        array = np.asarray(found)
    if shape is None and array.shape == (0,):
        return np.empty(0, np.int64 if whole else np.float64)
    fits = array.ndim == 1 if shape is None else array.shape == shape
    if not fits or array.dtype.kind not in ("iu" if whole else "biuf"):
        wanted = ("whole" if whole else "real") + f" numbers, shape {'(r,)' if shape is None else shape}"
        hint = "; np.flatnonzero(mask) makes them of a mask" if whole and array.dtype == bool else ""
        problem = f"returned {what} of type {array.dtype}, shape {array.shape}: return {wanted}{hint}"
        raise refuse_result(part, problem, round, client)
    array = array.astype(np.int64 if whole else np.float64)
    if not np.isfinite(array).all():
        raise refuse_result(part, f"returned {what} that are not all finite. Return finite numbers", round, client)
    return array


def result_tensor(part: Component, found: Any, shape: tuple[int, ...] | None, round: int | None = None) -> Tensor:
    """Return a component's result if it is a real tensor of this shape, or of any shape."""
    import torch  # slow to import, and the configuration is checked before

    if isinstance(found, torch.Tensor) and not found.is_complex() and (shape is None or found.shape == shape):
        return found
    is_tensor = isinstance(found, torch.Tensor)
    shown = f"a tensor of {found.dtype}, shape {tuple(found.shape)}" if is_tensor else f"a {type(found).__name__}"
    wanted = "any shape" if shape is None else f"shape {tuple(shape)}"
    raise refuse_result(part, f"returned {shown}. Return a tensor of real numbers, {wanted}", round)


def state_names(made: Any) -> tuple[str, ...]:
    """Return the attributes that a component names in `state`, in which a single name needs no tuple."""
    names = getattr(made, "state", ())
    return (names,) if isinstance(names, str) else tuple(names)


def state_tensor(part: Component, made: Any, name: str) -> Tensor:
    """Return a copy of an attribute that a component names in `state`, for a checkpoint."""
    import torch  # slow to import, and the configuration is checked before

    value = getattr(made, name)
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray | np.generic | int | float) and np.asarray(value).dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    problem = (
        f"keeps a {type(value).__name__} as {name!r}, which a checkpoint cannot store: state names attributes that "
        "are tensors, NumPy arrays of numbers, or numbers"
    )
    raise refuse_result(part, problem)


class Remembering:
    """Component that keeps the attributes named in its `state` between rounds; a single name needs no tuple.

    If the number of clients is given, attributes that the constructor does not set are arrays with a zero per client.
    """

    prefix = "component."  # of the names in a checkpoint

    def __init__(self, part: Component, options: Mapping[str, Any], clients: int | None = None):
        with calling(part):
            self.part, self._made = part, part.make(options)
        self.remembers = state_names(self._made)
        for name in self.remembers if clients is not None else ():
            if getattr(self._made, name, None) is None:
                setattr(self._made, name, np.zeros(clients or 0))

    def state(self) -> dict[str, Tensor]:
        """Return copies of its state for a checkpoint, without attributes that are missing or None."""
        kept = [name for name in self.remembers if getattr(self._made, name, None) is not None]
        return {f"{self.prefix}{name}": state_tensor(self.part, self._made, name) for name in kept}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        for name in self.remembers:
            if f"{self.prefix}{name}" in state:
                value = state[f"{self.prefix}{name}"]
                setattr(self._made, name, value.numpy().copy() if value.dim() else value.item())

    def share(self, broadcast: Callable[[Sequence[AnyArray]], list[AnyArray]]) -> None:
        """Give all ranks the state of rank 0; collective."""
        import torch  # slow to import, and the configuration is checked before

        own = self.state()
        sent = broadcast([value.numpy() for value in own.values()]) if own else []
        self.load({name: torch.from_numpy(value) for name, value in zip(own, sent, strict=True)})


def is_complex(found: Any) -> bool:
    """Check whether a component's result is complex; torch and NumPy would keep only the real parts."""
    own = getattr(found, "is_complex", None)  # only tensors have it
    return bool(own()) if callable(own) else isinstance(found, complex | np.ndarray) and np.iscomplexobj(found)


def failure_of(
    part: Component, cause: BaseException, problem: str, round: int | None = None, client: int | None = None
) -> ComponentFailure:
    """Build the failure of a component in which an exception was raised, with its line."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = user_frames(frames) if part.foreign else [frame for frame in frames if frame.filename != __file__]
    where = f"{own[-1].filename}:{own[-1].lineno}" if own else _definition(part)
    listing = "".join(traceback.format_list(frames[frames.index(own[0]) :])) if own else ""
    return ComponentFailure(part.kind, part.name, problem, where, listing.rstrip(), round, client)


def _definition(part: Component) -> str:
    """ "file:line" of the component's definition; the file alone if the line is unknown, "" if there is no file."""
    if part.source is None:
        return ""
    try:
        return f"{part.source}:{max(1, inspect.getsourcelines(inspect.unwrap(part.object))[1])}"
    except (OSError, TypeError, ValueError):
        return str(part.source)


def generator_states() -> GeneratorStates:
    """Return the states of the global generators."""
    states: GeneratorStates = {"random": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = (torch.default_generator.get_state(),)
        if torch.cuda.is_initialized():
            states["torch on the GPU"] = torch.cuda.get_rng_state_all()
    return states


_SET: dict[str, Callable[[Any], object]] = {
    "random": random.setstate,
    "numpy": np.random.set_state,
    "torch": lambda state: sys.modules["torch"].default_generator.set_state(state[0]),
    "torch on the GPU": lambda state: sys.modules["torch"].cuda.set_rng_state_all(state),
}


def put_back(states: GeneratorStates) -> None:
    """Restore the global generators to these states."""
    for name, state in states.items():
        _SET[name](state)


def drawn_from(before: GeneratorStates) -> list[str]:
    """Return the generators that were drawn from, or seeded, since these states."""
    after = generator_states()
    return [name for name in before if name in after and not all(map(np.array_equal, before[name], after[name]))]


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
