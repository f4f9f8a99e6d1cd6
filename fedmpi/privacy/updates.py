"""Client-level differential privacy: clip every client's update, add Gaussian noise at the server, account for it.

McMahan et al. 2018 ("Learning Differentially Private Recurrent Language Models"), with their fixed denominator: what is
released is (Σ Δ_k + N(0, σ² C²)) / W, ‖Δ_k‖ ≤ C, where W is known before the round and does not depend on who returns.
Two populations are neighbours if one client's data is replaced by other data (N is public): the sum moves by at most
2 C, so the noise multiplier that counts is σ / 2. The accounting is dp-accounting's, an optional dependency. It holds
only where the replaced client changes nothing but its own clipped update.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from fedmpi.clients.cohort import cohort_size
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats
from fedmpi.config import Config
from fedmpi.models.flat import FlatModel

CHUNK = 2**20
SENSITIVITY = 2.0
"""How far one replaced client moves the sum of clipped updates, in clipping norms: its own leaves, another's comes."""
ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 30)),
    *(quarter / 4 for quarter in range(16, 32)),
    *range(8, 33),
    *range(34, 65, 3),
    *(72, 80, 96, 128, 192, 300, 512, 1024),
)
"""Rényi orders, as dense as ε needs to come within 3 % of the library's longer default list."""
KEPT_BITS = 7
"""Leading bits of the number of clients present that are kept where it changes from round to round."""
LEAST, MOST = 1e-100, 1e6
"""Multipliers below the least count as none. Above the most a round is charged without sampling, where the bound for
samples leaves the range of floats; ε is next to nothing then."""


def clip(update: torch.Tensor, norm: float) -> tuple[torch.Tensor, bool]:
    """Scale an update, in place, so that its Euclidean norm is at most `norm`."""
    length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not np.isfinite(length):
        raise FloatingPointError("the update is not finite: training diverged; lower local.lr")
    clipped = length > norm
    if clipped:
        update.mul_(norm / length)
    return update, clipped


def add_noise(
    update: torch.Tensor, streams: Streams, round: int, noise_multiplier: float, norm: float, coefficient: float = 1.0
) -> torch.Tensor:
    """Add the server's Gaussian noise, in place; every rank draws the same.

    Parameters
    ----------
    update : Tensor float32 (d,)
        Σ c Δ_k, changed in place.
    streams : Streams
        The noise comes from the stream (DP_NOISE, round), in pieces of 2**20 coordinates.
    round : int
        The round.
    noise_multiplier : float
        σ.
    norm : float
        C, the clipping norm.
    coefficient : float
        c = 1/W, the same for every client and whoever returns: the noise is N(0, (σ C c)²) in every coordinate.

    Returns
    -------
    Tensor float32 (d,)
        The same tensor.
    """
    generator = streams.generator(Purpose.DP_NOISE, round)
    deviation = noise_multiplier * norm * coefficient
    for start in range(0, update.numel(), CHUNK):
        piece = update[start : start + CHUNK]
        noise = torch.from_numpy(generator.standard_normal(piece.numel(), dtype=np.float32))
        piece.add_(noise.to(update.device), alpha=deviation)
    return update


class GaussianAccountant:
    """ε(δ) of the rounds so far, for replacing one client's data.

    Rényi divergences of the rounds add up (Mironov 2017). A round is the Gaussian mechanism with multiplier σ / 2, of
    a uniform sample of fixed size without replacement where the cohort is such a sample and stays secret (Wang, Balle
    and Kasiviswanathan 2019, Theorem 27, or the bound without sampling where that is smaller).

    Parameters
    ----------
    noise_multiplier : float
        σ; 0 means no privacy, ε infinite from the first round.
    delta : float
        δ in (0, 1), customarily below 1/N.
    clients : int
        N.

    Raises
    ------
    UserError
        If dp-accounting is not installed, or of a version that hides its divergences, or a number is out of range.
    """

    def __init__(self, noise_multiplier: float, delta: float, clients: int):
        if noise_multiplier < 0 or not 0 < delta < 1:
            raise UserError(
                "privacy: the noise multiplier must not be negative and delta must lie in (0, 1), "
                f"not {noise_multiplier} and {delta}"
            )
        self._library = _dp_accounting()
        self.noise_multiplier, self.delta, self.clients = noise_multiplier, delta, clients
        self._spent = np.zeros(len(ORDERS))
        _divergences(noise_multiplier / SENSITIVITY, 1, 1)  # a library that cannot do it says so before the first round

    def spend(self, drawn: int, present: int) -> None:
        """Enter a round."""
        if not 0 <= drawn <= present:
            raise ValueError(f"cannot draw {drawn} of {present} clients")
        if present < self.clients:
            present = max(drawn, _leading(present))
        if drawn > 0:
            multiplier = self.noise_multiplier / SENSITIVITY
            self._spent += _divergences(multiplier, *((1, 1) if drawn == present else (drawn, present)))

    def epsilon(self) -> float:
        """ε so far at the given δ."""
        if not self._spent.any():
            return 0.0
        if np.isinf(self._spent).all():
            return float("inf")
        return float(self._library.rdp.compute_epsilon(ORDERS, self._spent, self.delta)[0])

    def state(self) -> dict[str, Floats]:
        """The Rényi divergences so far and their orders, for a checkpoint."""
        return {"orders": np.array(ORDERS), "spent": self._spent.copy()}

    def load(self, state: dict[str, Floats]) -> None:
        """Take over the divergences of a checkpoint."""
        if not np.array_equal(state["orders"], ORDERS):
            raise UserError("the checkpoint's privacy account is of another version of fedmpi: resume with that one")
        self._spent = state["spent"].copy()


def _leading(number: int) -> int:
    """The number with all but its leading `KEPT_BITS` bits set to zero."""
    dropped = max(0, number.bit_length() - KEPT_BITS)
    return number >> dropped << dropped


@lru_cache(maxsize=4096)
def _divergences(multiplier: float, drawn: int, present: int) -> Floats:
    """Rényi divergences at every order of one Gaussian round on `drawn` of `present` clients; computed once."""
    if multiplier < LEAST:
        return np.full(len(ORDERS), np.inf)
    dp = _dp_accounting()
    gaussian = dp.GaussianDpEvent(min(multiplier, 1 / LEAST))
    whole = _curve(gaussian)
    if drawn == present or multiplier > MOST:
        return whole
    return np.minimum(whole, _curve(dp.SampledWithoutReplacementDpEvent(present, drawn, gaussian)))


def _curve(event: Any) -> Floats:
    """The library's divergences of one event; they have no public name there."""
    dp = _dp_accounting()
    composed = dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE).compose(event)
    curve: Floats | None = getattr(composed, "_rdp", None)
    if curve is None or np.shape(curve) != (len(ORDERS),):
        raise UserError(
            f"dp-accounting {version('dp-accounting')} does not show the Rényi divergences that client-level privacy "
            "is accounted by: pip install 'dp-accounting>=0.4.3,<=0.6.0'"
        )
    return curve


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise UserError("client-level privacy needs an accountant: pip install 'fedmpi[dp]'") from None
    return dp_accounting


def adds_noise(config: Config) -> bool:
    """Whether updates are clipped and the server adds noise, so that an ε is reported."""
    return config.privacy.clip_norm is not None and config.privacy.noise_multiplier > 0


def planned_participants(config: Config, clients: int) -> int:
    """W, what the sum of clipped updates is divided by: the participants wanted, or N where all take part.

    Known before any round, whoever is there and returns (McMahan et al. 2018, the estimator with fixed denominator).
    """
    part = config.participation
    return clients if part.clients == "all" else cohort_size(clients, part.count, part.fraction)


def draws_in_secret(config: Config) -> bool:
    """Whether a round's cohort is a uniform sample that depends on nobody's data and shows in nothing but the sum.

    Otherwise a round is charged as if everybody took part. That is so where

    - everybody takes part;
    - who is there follows from the clients' labels;
    - clients keep what transport lost (error feedback): a round then depends on who was drawn before;
    - the participants' own size answers set p: they say something about who was drawn.

    Independent availability and drop-outs leave the draw uniform among those present. Over-selection draws more: all
    who are asked count as drawn. The first m of them to arrive are a function of the sample that one replaced client
    changes by one place.
    """
    part, samples = config.participation, config.samples
    asks_cohort = samples.rule == "bernoulli" and samples.asked == "participants"
    by_label = config.system.availability not in ("always", "bernoulli", "time-of-day")
    return part.clients == "uniform" and not (by_label or config.transport.error_feedback or asks_cohort)


def check_buffers(config: Config, model: FlatModel) -> None:
    """Refuse noise for a model whose buffers would be released without it."""
    if adds_noise(config) and model.has_buffers:
        raise UserError(
            f"model.name = {config.model.name!r} has buffers that clients change (batch norm); noise "
            "(privacy.noise_multiplier) does not protect them. Use group or layer norm, or track_running_stats = "
            "False; constants belong into buffers with persistent = False"
        )
