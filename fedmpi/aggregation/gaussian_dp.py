"""Client-level differential privacy: clip every client's update, add Gaussian noise at the server, account for it.

McMahan et al. 2018 ("Learning Differentially Private Recurrent Language Models"). The accounting is dp-accounting's,
an optional dependency.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmpi.errors import UserError
from fedmpi.streams import Purpose, Streams

METHODS = ("rdp", "pld")
CHUNK = 2**20


def clip(update: torch.Tensor, norm: float) -> tuple[torch.Tensor, bool]:
    """Scale an update, in place, so that its Euclidean norm is at most `norm`.

    Parameters
    ----------
    update : Tensor float32 (d,)
        Δ_k, changed in place.
    norm : float
        C > 0.

    Returns
    -------
    update : Tensor float32 (d,)
        The same tensor.
    clipped : bool
        Whether it was longer than `norm`.

    Raises
    ------
    FloatingPointError
        If the update is not finite; no scaling would bound it.
    """
    length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not np.isfinite(length):
        raise FloatingPointError("the update is not finite: training diverged; lower local.lr")
    clipped = length > norm
    if clipped:
        update.mul_(norm / length)
    return update, clipped


def add_noise(
    update: torch.Tensor,
    streams: Streams,
    round: int,
    noise_multiplier: float,
    norm: float,
    largest_coefficient: float = 1.0,
) -> torch.Tensor:
    """Add the server's Gaussian noise, in place; every rank draws the same.

    One client moves Σ c_k Δ_k by at most max c_k · C, so the noise is N(0, (σ · C · max c_k)²) in every coordinate; for
    a plain mean of m clients, max c_k = 1/m.

    Parameters
    ----------
    update : Tensor float32 (d,)
        The aggregated update, changed in place.
    streams : Streams
        The noise comes from the stream (DP_NOISE, round), in pieces of 2**20 coordinates.
    round : int
        The round.
    noise_multiplier : float
        σ.
    norm : float
        C, the clipping norm.
    largest_coefficient : float
        max c_k, after any normalisation.

    Returns
    -------
    Tensor float32 (d,)
        The same tensor.
    """
    generator = streams.generator(Purpose.DP_NOISE, round)
    deviation = noise_multiplier * norm * largest_coefficient
    for start in range(0, update.numel(), CHUNK):
        piece = update[start : start + CHUNK]
        noise = torch.from_numpy(generator.standard_normal(piece.numel(), dtype=np.float32))
        piece.add_(noise.to(update.device), alpha=deviation)
    return update


class GaussianAccountant:
    """ε(δ) of the rounds so far, for adding or removing one client.

    A round whose largest inclusion probability is q counts as a Poisson-subsampled Gaussian mechanism with rate q. For
    a cohort of fixed size this is the customary approximation, not a theorem. Where the cohort is no secret, or the
    draw looks at the clients' data (importance, strata of gradients), give q = 1: that needs no sampling argument.

    Parameters
    ----------
    noise_multiplier : float
        σ; 0 means no privacy, ε infinite from the first round.
    delta : float
        δ in (0, 1), customarily below 1/N.
    method : str
        "rdp" (Rényi, fast) or "pld" (privacy loss distributions, tighter).

    Raises
    ------
    UserError
        If dp-accounting is not installed or a number is out of range.
    """

    def __init__(self, noise_multiplier: float, delta: float, method: str = "rdp"):
        if noise_multiplier < 0 or not 0 < delta < 1:
            raise UserError(
                "privacy: the noise multiplier must not be negative and delta must lie in (0, 1), "
                f"not {noise_multiplier} and {delta}"
            )
        if method not in METHODS:
            raise UserError(f"privacy: the accountant {method!r} is unknown: choose {' or '.join(METHODS)}")
        self._library = _dp_accounting()
        self.noise_multiplier, self.delta, self.method = noise_multiplier, delta, method
        self._rounds: Counter[float] = Counter()

    def spend(self, sampling_probability: float) -> None:
        """Enter a round.

        Parameters
        ----------
        sampling_probability : float
            q in [0, 1], the largest inclusion probability of a client.
        """
        if not 0 <= sampling_probability <= 1:
            raise ValueError(f"the sampling probability must lie in [0, 1], not {sampling_probability}")
        if sampling_probability > 0:
            self._rounds[sampling_probability] += 1

    def epsilon(self) -> float:
        """ε so far at the given δ."""
        if not self._rounds:
            return 0.0
        dp = self._library
        accountant = dp.rdp.RdpAccountant() if self.method == "rdp" else dp.pld.PLDAccountant()
        gaussian = dp.GaussianDpEvent(self.noise_multiplier)
        for probability, count in self._rounds.items():
            event = gaussian if probability == 1 else dp.PoissonSampledDpEvent(probability, gaussian)
            accountant.compose(event, count)
        return float(accountant.get_epsilon(self.delta))

    def state(self) -> dict[str, NDArray[Any]]:
        """The rounds by sampling probability, for a checkpoint."""
        return {
            "probabilities": np.array(list(self._rounds.keys()), np.float64),
            "rounds": np.array(list(self._rounds.values()), np.int64),
        }

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Take over the rounds of a checkpoint."""
        self._rounds = Counter(dict(zip(state["probabilities"].tolist(), state["rounds"].tolist(), strict=True)))


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise UserError("client-level privacy needs an accountant: pip install 'fedmpi[dp]'") from None
    return dp_accounting
