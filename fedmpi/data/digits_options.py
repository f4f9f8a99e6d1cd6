"""How the embedded digits are given to clients: the options beside `data.source = "digits"`, or within its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

from fedmpi.common.data_choices import DIGITS
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register


@register("data source", name=DIGITS)
@dataclass(frozen=True, kw_only=True)
class DigitsOptions:
    """The 1,797 handwritten digits that come with scikit-learn, given to clients; no file is needed.

    `data.source` may also name a folder that `python -m data_prep` wrote. Options may be written in the name as well,
    "digits:clients=50,partition=iid".

    Parameters
    ----------
    clients : int
        N, at most the 1,442 training images.
    partition : {"dirichlet", "iid"}
        Dirichlet(alpha) shares of the clients for every class, or equal random parts.
    alpha : float
        Concentration of the Dirichlet law; the default is mildly heterogeneous.
    seed : int
        Seed of the partition, independent of a run's seed.
    """

    clients: int = 20
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    alpha: float = 1.0
    seed: int = 0


def parse_options(where: str, options: Mapping[str, Any]) -> DigitsOptions:
    """The options in ``"digits:clients=50,partition=iid"`` and those in `options`, checked; raises `UserError`."""
    written = where.split(":", 1)[1] if ":" in where else ""
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in written.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"{item!r} in data.source = {where!r} is not key=value: write e.g. digits:clients=50")
        given[key.strip()] = value.strip()
    for key in given.keys() & options.keys():
        raise UserError(
            f"data.source = {where!r} and data.{key} = {options[key]!r} say the same in two ways. Keep one of them"
        )
    given.update(options)
    kinds: dict[str, Callable[[Any], Any]] = {key: type(value) for key, value in asdict(DigitsOptions()).items()}
    values = {}
    for key, value in given.items():
        if key not in kinds:
            close = get_close_matches(key, kinds, n=1)
            hint = f"did you mean {close[0]}?" if close else f"they are {', '.join(kinds)}"
            raise UserError(f"the embedded digits have no option {key!r} (data.source = {where!r}): {hint}")
        try:
            values[key] = kinds[key](value)
        except (TypeError, ValueError):
            raise UserError(f"{key} = {value!r} of the embedded digits is not a number") from None
    return _checked(DigitsOptions(**values), where)


def _checked(options: DigitsOptions, where: str) -> DigitsOptions:
    context = f"of the embedded digits (data.source = {where!r})"
    if options.partition not in ("dirichlet", "iid"):
        raise UserError(f"partition = {options.partition!r} {context} is unknown: choose dirichlet or iid")
    if options.clients < 1:
        raise UserError(f"clients = {options.clients} {context} is impossible: ask for at least one")
    if not 1e-3 <= options.alpha <= 1e6:
        raise UserError(f"alpha = {options.alpha} {context} is impossible: choose a number from 0.001 to 1000000")
    if not 0 <= options.seed < 2**64:
        raise UserError(f"seed = {options.seed} {context} is impossible: choose a number from 0 to 2**64 - 1")
    return options
