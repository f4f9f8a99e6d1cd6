"""Devices and network as a simulated clock: compute and network speed of each client, drop-outs, late updates, and the
length of a round. Seconds are simulated; the run does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.sampler import View
from fedmpi.clients.tables import per_client
from fedmpi.common.apportionment import places_within
from fedmpi.common.calling import calling, refuse_result, result_array, takes
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config import Config
    from fedmpi.config.tables import DevicesTable

Positive = Annotated[float, Field(gt=0, le=1e30)]
Share = Annotated[float, Field(ge=0, le=1)]

RATES = {"speed": 1e3, "upload": 1e6, "download": 4e6}
"""Default medians: samples per second, bytes per second from and to a client."""
WATTS = {"download": 1.0, "training": 3.0, "upload": 1.0}
"""Default powers during the phases of a client's work, in their order."""
DROP_OUT, TIES = 1, 2  # sub-streams of Purpose.AVAILABILITY


@dataclass(frozen=True, eq=False)
class Devices:
    """Speeds and powers of the clients' devices."""

    speed: Floats  # (N,): Samples trained per second, for a model whose sample costs 1
    upload: Floats  # (N,): Bytes per second from and to the client
    download: Floats
    watts: Floats | None = None  # (3, N): Power during download, training and upload


@register("device rate", name="constant")
def constant(view: View, *, default: float, median: Positive | None = None) -> Floats:
    """Give all clients the same rate.

    Parameters
    ----------
    median : float
        The rate per second: samples of a device, bytes of a link.
    """
    return np.full(len(view.sizes), default if median is None else median)


@register("device rate", name="lognormal")
def lognormal(
    view: View, *, default: float, median: Positive | None = None, sigma: Annotated[float, Field(ge=0, le=50)] = 1.0
) -> Floats:
    """Draw lognormal rates.

    Parameters
    ----------
    median : float
        Median of the rates per second.
    sigma : float
        Standard deviation of the logarithm of the rate.
    """
    return constant(view, default=default, median=median) * np.exp(
        sigma * view.generator.standard_normal(len(view.sizes))
    )


@register("device rate", name="table")
def from_table(view: View, *, file: str, column: str) -> Floats:
    """Read the rate of each client from a table: row k is client k, unless the table has a column `client`.

    Parameters
    ----------
    file : str
        Parquet, NPZ or CSV file, relative to the working directory.
    column : str
        Name of its column with the rates.
    """
    return per_client(file, column, len(view.sizes))


@register("device rate", name="classes")
class Classes:
    """Draw a class of devices for each client; each class has its rate.

    Parameters
    ----------
    rates : tuple of float
        Rate per second of each class.
    shares : tuple of float
        Share of each class, which sum to 1.
    """

    def __init__(self, *, rates: tuple[Positive, ...], shares: tuple[Share, ...]):
        self.rates, self.shares = rates, shares

    def refuses(self, config: Config) -> str | None:
        """Reject shares that do not fit the rates."""
        fit = self.rates and len(self.shares) == len(self.rates) and abs(sum(self.shares) - 1) <= 1e-6
        return None if fit else "give as many shares as rates; shares sum to 1"

    def __call__(self, view: View) -> Floats:
        kind = np.searchsorted(np.cumsum(self.shares), view.generator.random(len(view.sizes)), side="right")
        return np.asarray(self.rates, np.float64)[np.minimum(kind, len(self.rates) - 1)]


def draw_devices(
    streams: Streams, sizes: Ints, tables: DevicesTable, counts: Callable[[], Ints] | None = None
) -> Devices:
    """Assign every client a device, once per run.

    Each rate has one stream of Purpose.DEVICE whose k-th number belongs to client k: a client keeps its device if
    clients are added after it.
    """
    clients, drawn = len(sizes), []
    chosen: list[tuple[Component, float]] = [(getattr(tables, name), default) for name, default in RATES.items()]
    if tables.power is not None:
        chosen += [(getattr(tables.power, name), default) for name, default in WATTS.items()]
    for place, (part, default) in enumerate(chosen):
        view = View(0, clients, sizes, clients, streams, counts=counts, stream=(Purpose.DEVICE, place))
        drawn.append(rates_of(part, part.make(), view, default))
    speed, upload, download, *watts = drawn
    return Devices(speed, upload, download, np.stack(watts) if watts else None)


def rates_of(part: Component, made: Any, view: View, default: float = RATES["speed"]) -> Floats:
    """Return the rate of each client, float64 (N,); a component may use `default`, the median without options."""
    named = takes(part, made, "view", offered=("default",))
    with calling(part):
        found = made(view, **dict.fromkeys(named, default))
    rates: Floats = result_array(part, found, view.sizes.shape, "rates")
    if not (rates > 0).all():
        raise refuse_result(part, f"returned the rate {rates.min():g}. Return rates above 0")
    return rates


def phases(devices: Devices, clients: Ints, samples: Ints | Floats, bytes_down: int, bytes_up: int) -> Floats:
    """Return the simulated seconds of each client's download, training and upload, float64 (3, m).

    `samples` (m,) pass through the model: local steps × batch size.
    """
    transfers = bytes_down / devices.download[clients], bytes_up / devices.upload[clients]
    return np.stack([transfers[0], samples / devices.speed[clients], transfers[1]])


def total(times: Floats) -> Floats:
    """Return the simulated seconds from the start of each client until its update arrives, float64 (m,)."""
    download, training, upload = times
    return np.asarray(training + download + upload)


def steps_in(samples: Floats, used: Floats, batch: Floats, per_pass: Floats | None) -> tuple[Ints, Floats]:
    """Return the number of whole local steps of so many samples, int64 (m,), and their samples, float64 (m,).

    `used` (m,) samples of a client are used, in batches of `batch` (m,). With `per_pass`, the samples of an epoch (m,),
    its last batch may be smaller. A millionth of a millionth of a step may be missing, for rounding.
    """
    room, batch = samples * (1 + 1e-12), np.maximum(batch, np.finfo(np.float64).tiny)
    if per_pass is None:
        steps = np.floor(room / batch)
        return steps.astype(np.int64), steps * np.minimum(used, batch)
    per_pass = np.maximum(per_pass, batch)
    epochs = np.floor(room / per_pass)
    more = np.floor((room - epochs * per_pass) / batch)
    return (epochs * np.ceil(per_pass / batch) + more).astype(np.int64), epochs * per_pass + more * batch


def joules(devices: Devices, clients: Ints, times: Floats, ends: Floats) -> Floats:
    """Return the energy of each client, float64 (m,): watts · seconds of its phases (3, m), up to its end (m,)."""
    assert devices.watts is not None
    starts = np.cumsum(times, axis=0) - times
    spent: Floats = (devices.watts[:, clients] * np.clip(ends - starts, 0, times)).sum(axis=0)
    return spent


def first_to_arrive(streams: Streams, round: int, cohort: Cohort, seconds: Floats, count: int) -> Cohort:
    """Apply over-selection: the server takes the first updates to arrive and closes the round.

    Ties between updates that arrive at the same time are broken with equal probability.

    In a stratified cohort the first m_h = `strata.draws[h]` of each stratum are taken (FedSSO, §3.4.2). Inclusion
    probabilities of a cohort without strata shrink by m / invited, which is exact if arrival is independent of the
    draw; stratified ones already include that.
    """
    clients = int(cohort.clients.max(initial=-1)) + 1
    ties = streams.generator(Purpose.AVAILABILITY, round, TIES).random(clients)[cohort.clients]
    order = np.lexsort((ties, seconds))
    if cohort.stratum is None or cohort.strata is None:
        taken = order[:count]
        shrink = min(count / max(len(cohort.clients), 1), 1.0)
    else:
        stratum, place = cohort.stratum[order], np.empty(len(order), np.int64)  # in order of arrival
        place[np.argsort(stratum, kind="stable")] = places_within(np.bincount(stratum))
        taken = order[place < cohort.strata.draws[stratum]]
        shrink = 1.0
    keep = np.zeros(len(cohort.clients), bool)
    keep[taken] = True
    return restricted(cohort, keep, shrink)


def survivors(streams: Streams, round: int, cohort: Cohort, clients: int, drop_out: float) -> Cohort:
    """Remove the clients that drop out after training, each with probability `drop_out`, independently.

    Inclusion probabilities shrink such that Horvitz-Thompson weights stay unbiased: by 1 − drop_out, or, if a stratum
    has more invited clients than places, by the expected share of its m_h places that are still filled.

    The k-th number of a sub-stream of Purpose.AVAILABILITY decides for client k.
    """
    if drop_out == 0:
        return cohort
    chance = streams.generator(Purpose.AVAILABILITY, round, DROP_OUT).random(clients)[cohort.clients]
    left = restricted(cohort, chance >= drop_out, _filled_places(cohort, 1.0 - drop_out))
    if cohort.stratum is None or cohort.strata is None:
        return left
    strata, asked = cohort.strata, np.bincount(cohort.stratum, minlength=len(cohort.strata.draws))
    before = np.ones(len(asked)) if strata.represented is None else strata.represented
    represented = np.where(asked > 0, before * (1.0 - drop_out**asked), before)  # not all of its clients drop out
    return replace(left, strata=replace(strata, represented=represented))


def restricted(cohort: Cohort, keep: NDArray[np.bool_], shrink: Floats | float = 1.0) -> Cohort:
    """Select the clients marked in `keep` (m,); multiply inclusion probabilities by `shrink`, a number or (m,).

    `strata` is unchanged: m_h remains the number allocated.
    """
    return replace(
        cohort,
        clients=cohort.clients[keep],
        multiplicity=cohort.multiplicity[keep],
        inclusion=None if cohort.inclusion is None else (cohort.inclusion * shrink)[keep],
        stratum=None if cohort.stratum is None else cohort.stratum[keep],
        **{name: values[keep] for name, values in cohort.own_work.items()},
    )


def _filled_places(cohort: Cohort, survival: float) -> Floats | float:
    """Return E[min(m_h, arrivals)] / m_h of each client's stratum; the survival probability if no more are invited."""
    from scipy.special import bdtrc  # slow to import, and most runs have no drop-outs

    if cohort.stratum is None or cohort.strata is None:
        return survival
    places = cohort.strata.draws
    asked = np.bincount(cohort.stratum, minlength=len(places))
    of = np.repeat(np.arange(len(places)), places)  # the stratum of every place
    place = places_within(places).astype(np.float64)
    filled = np.bincount(of, bdtrc(place, asked[of], survival), minlength=len(places))
    return np.asarray((filled / np.maximum(places, 1))[cohort.stratum])
