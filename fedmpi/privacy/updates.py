"""Client-level differential privacy: clipping of every client's update, Gaussian noise at the server, accounting.

McMahan et al. 2018 ("Learning Differentially Private Recurrent Language Models"), with their fixed denominator: the
server releases (Σ Δ_k + N(0, σ² C²)) / W, ‖Δ_k‖ ≤ C, where W is known before the round and does not depend on the
returned updates. Two populations are neighbors if one client's data is replaced by other data (N is public): the sum
changes by at most 2 C, so the effective noise multiplier is σ / 2. The accounting uses dp-accounting, an optional
dependency. It is valid only if the replaced client changes nothing except its own clipped update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from fedmpi.updates.compression import keeps_residuals

CHUNK = 2**20
SENSITIVITY = 2.0
"""Largest change of the sum of clipped updates by one replaced client, in clipping norms: one leaves, one comes."""
ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 30)),
    *(quarter / 4 for quarter in range(16, 32)),
    *range(8, 33),
    *range(34, 65, 3),
    *(72, 80, 96, 128, 192, 300, 512, 1024),
)
"""Rényi orders, dense enough for an ε within 3 % of the library's longer default list."""
KEPT_BITS = 7
"""Number of leading bits kept of the number of available clients if it changes from round to round."""
LEAST, MOST = 1e-100, 1e6
"""Bounds of the multipliers. Below the least a multiplier counts as 0. Above the most a round is charged without
sampling, where the bound for samples exceeds the range of floats; ε is negligible then."""


def clip(update: torch.Tensor, norm: float) -> tuple[torch.Tensor, bool]:
    """Scale an update in place so that its Euclidean norm is at most `norm`."""
    length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not np.isfinite(length):
        raise FloatingPointError("the update is not finite: training diverged; lower local.lr")
    clipped = length > norm
    if clipped:
        update.mul_(norm / length)
    return update, clipped


def add_noise(update: torch.Tensor, streams: Streams, round: int, deviation: float, level: int = 0) -> torch.Tensor:
    """Add the server's Gaussian noise N(0, deviation²) in place; every rank draws the same.

    It comes from the stream (DP_NOISE, round, level), in pieces of 2**20 coordinates.
    """
    generator = streams.generator(Purpose.DP_NOISE, round, level)
    for start in range(0, update.numel(), CHUNK):
        piece = update[start : start + CHUNK]
        noise = torch.from_numpy(generator.standard_normal(piece.numel(), dtype=np.float32))
        piece.add_(noise.to(update.device), alpha=deviation)
    return update


def tree_nodes(leaf: int) -> list[tuple[int, int, int]]:
    """Return the changes that a leaf (from 1) makes to the nodes of a binary tree that cover all leaves so far.

    A change is (1 = node added, −1 = removed, level of the node, its last leaf). There is a node for each 1 in the
    binary digits of the leaf.
    """
    level = (leaf & -leaf).bit_length() - 1
    return [(1, level, leaf), *((-1, lower, (leaf - 1) >> lower << lower) for lower in range(level))]


class Clipping:
    """Clipping norm of updates, and the noise on their sum.

    The noise of privacy.noise = "independent" is N(0, (σ C / W)²) per coordinate of the sum of Δ_k / W. That of "tree"
    is the difference between the noise of two prefix sums (DP-FTRL, Kairouz et al. 2021, Algorithm 1), so that the
    noise of all rounds of an epoch adds up to that of a few nodes of a binary tree. Each epoch of ⌊N/W⌋ rounds starts a
    new tree (restart, without completion of the last one). The nodes' noise is drawn by level and round.

    An adaptive norm follows a quantile γ of the norms of updates (Andrew et al. 2021, Algorithm 1): C ← C exp(−η (b̃ −
    γ)), b̃ = ½ + (Σ (b_k − ½) + N(0, σ_b²)) / W, with b_k = 1 if ‖Δ_k‖ ≤ C. For the same ε, the noise of the updates
    grows to σ_Δ = (σ⁻² − (2 σ_b)⁻²)^(−1/2).
    """

    def __init__(self, config: Config, streams: Streams, clients: int):
        part, self.streams = config.privacy, streams
        assert part.clip_norm is not None
        self.norm = self.used = float(part.clip_norm)  # C of the next and of the latest round
        self.adaptive, self.multiplier, self.count_noise = part.adaptive_clip, part.noise_multiplier, 0.0
        self.planned = planned_participants(config, clients)
        self.restart = clients // self.planned if part.noise == "tree" else 0
        if self.adaptive is not None and part.noise_multiplier > 0:
            given = self.adaptive.count_noise
            self.count_noise = self.planned / 20 if given is None else given
            if 2 * self.count_noise <= part.noise_multiplier:
                raise UserError(
                    f"privacy.adaptive_clip.count_noise = {self.count_noise:g} leaves no ε for the updates. Set more "
                    f"than half of privacy.noise_multiplier = {part.noise_multiplier:g}"
                )
            self.multiplier = (part.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5

    def add_noise(self, update: torch.Tensor, round: int) -> None:
        """Add a round's noise to the mean update (d,) in place."""
        deviation = self.multiplier * self.norm / self.planned
        if not self.restart:
            add_noise(update, self.streams, round, deviation)
            return
        leaf = round % self.restart + 1
        for sign, level, last in tree_nodes(leaf):
            add_noise(update, self.streams, round - leaf + last, sign * deviation, level)

    def follow(self, round: int, returned: float, clipped: float) -> None:
        """Adapt the norm after a round in which so many updates were returned, and so many of them clipped."""
        self.used = self.norm
        if self.adaptive is None:
            return
        noise = float(self.streams.generator(Purpose.DP_NOISE, round, 1).standard_normal()) * self.count_noise
        within = 0.5 + (returned / 2 - clipped + noise) / self.planned
        self.norm *= math.exp(-self.adaptive.lr * (within - self.adaptive.quantile))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the norm of the next round, for a checkpoint."""
        return {} if self.adaptive is None else {"clip_norm": torch.tensor([self.norm], dtype=torch.float64)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the norm of a checkpoint."""
        if self.adaptive is not None and "clip_norm" in state:
            self.norm = float(state["clip_norm"])


class GaussianAccountant:
    """ε(δ) of the rounds so far, for replacing one client's data.

    Rényi divergences of the rounds add up (Mironov 2017). A round is the Gaussian mechanism with multiplier σ / 2. If
    the cohort is a secret uniform sample of fixed size without replacement, it is that of such a sample (Wang, Balle
    and Kasiviswanathan 2019, Theorem 27, or the bound without sampling if that is smaller).
    σ is the noise multiplier, 0 for no privacy: ε is then infinite from the first round.
    """

    def __init__(self, noise_multiplier: float, delta: float, clients: int):
        self._library = _dp_accounting()
        self.noise_multiplier, self.delta, self.clients = noise_multiplier, delta, clients
        self._spent = np.zeros(len(ORDERS))
        _divergences(noise_multiplier / SENSITIVITY, 1, 1)  # detects an unsuitable library before the first round

    def spend(self, drawn: int, present: int) -> None:
        """Add a round."""
        if present < self.clients:
            present = max(drawn, _leading(present))
        if drawn > 0:
            multiplier = self.noise_multiplier / SENSITIVITY
            self._spent += _divergences(multiplier, *((1, 1) if drawn == present else (drawn, present)))

    def epsilon(self) -> float:
        """Return ε so far at the given δ."""
        if not self._spent.any():
            return 0.0
        if np.isinf(self._spent).all():
            return float("inf")
        return float(self._library.rdp.compute_epsilon(ORDERS, self._spent, self.delta)[0])

    def state(self) -> dict[str, Floats]:
        """Return the Rényi divergences so far and their orders, for a checkpoint."""
        return {"orders": np.array(ORDERS), "spent": self._spent.copy()}

    def load(self, state: dict[str, Floats]) -> None:
        """Restore the divergences of a checkpoint."""
        if not np.array_equal(state["orders"], ORDERS):
            raise UserError("the checkpoint's privacy account is of another version of fedmpi. Resume with that one")
        self._spent = state["spent"].copy()


class TreeAccountant(GaussianAccountant):
    """ε(δ) of prefix sums with the noise of binary trees (Kairouz et al. 2021), each of so many rounds.

    A client is selected at most once in a tree. After j rounds its update is in at most ⌊log₂ j⌋ + 1 nodes, each of
    which is a Gaussian mechanism with multiplier σ / 2; trees add up. Nothing is amplified by sampling.
    """

    def __init__(self, noise_multiplier: float, delta: float, clients: int, restart: int):
        super().__init__(noise_multiplier, delta, clients)
        self.restart, self._rounds = restart, 0

    def spend(self, drawn: int, present: int) -> None:
        """Add a round; only its place in the tree matters."""
        leaf = self._rounds % self.restart + 1
        self._rounds += 1
        if not leaf & (leaf - 1):
            super().spend(1, 1)

    def state(self) -> dict[str, Floats]:
        return super().state() | {"rounds": np.array([self._rounds], np.float64)}

    def load(self, state: dict[str, Floats]) -> None:
        super().load(state)
        self._rounds = int(state["rounds"][0])


def accountant(config: Config, clients: int) -> GaussianAccountant | None:
    """Return the accountant of a configuration; None without noise."""
    part = config.privacy
    if not adds_noise(config):
        return None
    if part.noise == "tree":
        restart = clients // planned_participants(config, clients)
        return TreeAccountant(part.noise_multiplier, part.delta, clients, restart)
    return GaussianAccountant(part.noise_multiplier, part.delta, clients)


def _leading(number: int) -> int:
    """Return the number with all bits except its leading `KEPT_BITS` set to zero."""
    dropped = max(0, number.bit_length() - KEPT_BITS)
    return number >> dropped << dropped


@lru_cache(maxsize=4096)
def _divergences(multiplier: float, drawn: int, present: int) -> Floats:
    """Return Rényi divergences at every order of one Gaussian round on `drawn` of `present` clients; cached."""
    if multiplier < LEAST:
        return np.full(len(ORDERS), np.inf)
    dp = _dp_accounting()
    gaussian = dp.GaussianDpEvent(min(multiplier, 1 / LEAST))
    whole = _curve(gaussian)
    if drawn == present or multiplier > MOST:
        return whole
    return np.minimum(whole, _curve(dp.SampledWithoutReplacementDpEvent(present, drawn, gaussian)))


def _curve(event: Any) -> Floats:
    """Return the library's divergences of one event; they have no public name there."""
    dp = _dp_accounting()
    composed = dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE).compose(event)
    curve: Floats | None = getattr(composed, "_rdp", None)
    if curve is None or np.shape(curve) != (len(ORDERS),):
        raise UserError(
            f"dp-accounting {version('dp-accounting')} does not show the Rényi divergences that client-level privacy "
            "is accounted by. Run pip install 'dp-accounting>=0.4.3,<=0.6.0'"
        )
    return curve


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise UserError("client-level privacy needs an accountant. Run pip install 'fedmpi[dp]'") from None
    return dp_accounting


def adds_noise(config: Config) -> bool:
    """Return whether updates are clipped and the server adds noise, so that an ε is reported."""
    return config.privacy.clip_norm is not None and config.privacy.noise_multiplier > 0


def planned_participants(config: Config, clients: int) -> int:
    """Return W, the divisor of the sum of clipped updates: the number of clients to select, or N if all are.

    Known before any round, independent of availability (McMahan et al. 2018, the estimator with fixed denominator).
    """
    part = config.clients
    return clients if part.sampler.name == "all" else cohort_size(clients, part.count, part.fraction)


def draws_in_secret(config: Config) -> bool:
    """Check whether a round's cohort is a secret uniform sample that is independent of the clients' data.

    Only the sum may reveal it. Otherwise a round is charged as if all clients were selected. That is so if

    - all clients are selected;
    - availability follows from the clients' labels;
    - clients keep the transport's losses (error feedback): a round then depends on earlier cohorts;
    - the selected clients' own size reports set p: they reveal something about the cohort.

    Independent availability and drop-outs leave the draw uniform among the available clients. Over-selection draws
    more: all invited clients count as drawn. The first m of them to arrive are a function of the sample that one
    replaced client changes by one place.
    """
    samples = config.samples
    asks_cohort = samples.sampler.name == "bernoulli" and samples.size.query == "selected"
    by_label = config.clients.availability.name not in ("always", "bernoulli")
    return config.clients.sampler.name == "uniform" and not (by_label or keeps_residuals(config) or asks_cohort)


def check_buffers(config: Config, model: FlatModel) -> None:
    """Reject noise for a model whose buffers would be released without it."""
    if adds_noise(config) and model.has_buffers:
        raise UserError(
            f"model = {config.model.name!r} has buffers that clients change (batch norm); noise "
            "(privacy.noise_multiplier) does not protect them. Use group or layer norm, or track_running_stats = "
            "False; constants belong into buffers with persistent = False"
        )
