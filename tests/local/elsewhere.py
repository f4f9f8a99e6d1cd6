"""A simulated device: tensors that report another device, keep their values on the CPU, and mix with no others.

Code that forgets to name a device gets a tensor on the CPU, and the first operation that mixes it with the others
raises `Mixed`, as a GPU would fail. Values are computed for real, so that results can be compared bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fedmpi.local.graphs import Graphs

ELSEWHERE = torch.device("lazy", 0)
"""A kind of device that every build of torch knows and none computes on."""
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
READ = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "bincount", "masked_select", "equal", "is_nonzero"}
"""Operations that make the host wait for their result."""
VIEWS = {
    *("view", "as_strided", "select", "slice", "transpose", "permute", "expand", "unsqueeze", "squeeze", "unbind", "t"),
    *("split", "split_with_sizes", "detach", "alias", "_unsafe_view", "_reshape_alias", "narrow", "unfold", "diagonal"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "lift_fresh", "resize_"),
}
"""Operations that start nothing on a device."""
_watched: list[list[str]] = []


class Mixed(Exception):
    """An operation on tensors of two devices."""


class Away(Tensor):
    """A tensor elsewhere; its values are `held`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        made: Away = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
        )
        made.held = held
        return made

    @property
    def data(self) -> Tensor:
        return Away(self.held)  # counts its own changes, while detach() shares the count

    @data.setter
    def data(self, value: Away) -> None:
        self.held = value.held

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise Mixed("numpy() of a tensor elsewhere")
        for found in _watched:
            found.append("to the host")
        return self.held.numpy(force=True).copy()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Constants(TorchFunctionMode):
    """torch.tensor fills what it makes behind the dispatcher's back: there it is made here and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs, device="cpu").to(device)
        return func(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Context in which the simulated device can compute."""
    with _Constants(), _Factories():
        yield ELSEWHERE


class _Recorder(TorchDispatchMode):
    """Replacement of a CUDA graph: repeats a step's operations on the same tensors, with the same numbers."""

    def __init__(self, step: Callable[[], None]):
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.fresh = True  # recording has computed the first use
        with self:
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in VIEWS:
            self.calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """Compute every operation again, into the tensors that it returned at first."""
        for func, args, kwargs, found in [] if self.fresh else self.calls:
            for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)
        self.fresh = False


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Context in which recorders replace CUDA graphs; yields the numbers of captures and replays."""
    used: Counter[str] = Counter()

    def capture(graphs: Graphs, step: Callable[[], None]) -> Callable[[], None]:
        used["captured"] += 1
        recorder = _Recorder(step)
        return lambda: (used.update(replayed=1), recorder.replay())[1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Graphs, "capture", capture)
        yield used


@contextmanager
def transfers() -> Iterator[list[str]]:
    """Context that records every operation on the device as "kernel", and every copy and value that the host must know
    as "to the device" or "to the host"."""
    found: list[str] = []
    _watched.append(found)
    try:
        yield found
    finally:
        _watched[:] = [one for one in _watched if one is not found]


def _note(func: Any, args: Any, away: list[Away], device: torch.device | None) -> None:
    name = func._schema.name.removeprefix("aten::")
    masked = name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1])
    if func is torch.ops.aten.copy_.default:
        into, source = (isinstance(one, Away) for one in args[:2])
    elif func is torch.ops.aten._to_copy.default and device is not None:
        into, source = device.type != "cpu", bool(away)
    else:
        into, source = bool(away) and not masked and name not in READ, bool(away)
    kinds = ["to the device" if into else "to the host"] if into != source else []
    if name not in VIEWS and name != "_local_scalar_dense" and (away or (device is not None and device.type != "cpu")):
        kinds.append("kernel")
    if name == "index_add_" and away and args[2].numel() > len(torch.unique(args[2].held)):
        kinds.append("sum in any order")
    for found in _watched:
        found.extend(kinds)


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    away = [tensor for tensor in tensors if isinstance(tensor, Away)]
    if away and func not in COPIES:
        changed = tensors[:1] if func._schema.name.endswith("_") else []
        for tensor in tensors:
            if not isinstance(tensor, Away) and (tensor.dim() or any(tensor is one for one in changed)):
                raise Mixed(f"{func}: {[(type(one).__name__, tuple(one.shape)) for one in tensors]}")
    _note(func, args, away, device)
    inner_args, inner = tree_map_only(Away, lambda tensor: tensor.held, (args, kwargs))
    if device is not None:
        inner = inner | {"device": torch.device("cpu")}
    found = func(*inner_args, **inner)
    leaves = device.type == "cpu" if device is not None else not away
    if func is torch.ops.aten.copy_.default:
        return args[0]
    if leaves or not isinstance(found, Tensor | tuple | list):
        return found
    wrapped = tree_map_only(Tensor, Away, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if away else wrapped
