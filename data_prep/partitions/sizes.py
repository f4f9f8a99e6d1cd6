"""Partitions by size (log-normal as in FedSampling, and others), and by users.

Sizes are whole numbers of at least one, vectorized over clients.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from data_prep.partitions import Count, NotNegative, Partition, Positive, Request
from fedmpi.common.apportionment import largest_remainders
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.types import Floats, Ints
from fedmpi.data.assignment import even_sizes, group_by_owner, iid

MOST_SAMPLES = 1 << 53
"""Largest number up to which floats represent every whole number."""
SizeLaw = Literal["even", "lognormal", "pareto", "zipf", "linear", "square", "exponential"]


def relative_sizes(law: SizeLaw, clients: int, shape: float, generator: np.random.Generator) -> Floats:
    """Draw positive relative sizes of the clients, float64 (N,)."""
    if law == "even":
        return np.ones(clients)
    if law == "lognormal":
        return generator.lognormal(0.0, shape, clients)
    if law == "pareto":
        return 1.0 + generator.pareto(shape, clients)
    if law == "zipf":
        return generator.permutation(np.arange(1, clients + 1, dtype=np.float64) ** -shape)
    ranks = np.arange(1, clients + 1, dtype=np.float64)
    if law in ("linear", "square"):
        return generator.permutation(ranks if law == "linear" else ranks**2)
    return generator.permutation(np.exp(shape * (ranks - clients)))  # exponential: the largest is 1, whatever N


def whole_sizes(relative: Floats, total: int) -> Ints:
    """Return whole sizes of at least one that sum to `total`, in proportion to `relative`, int64 (N,).

    Every client has one sample. The others are shared by largest remainders, in proportion to the part of a client's
    exact size above one.
    """
    clients = len(relative)
    if not np.isfinite(relative.sum()):
        raise UserError("the size of the largest client overflows. Choose a milder one (--shape, or --sigma)")
    if total < clients:
        raise UserError(f"{total} samples cannot give {clients} clients one each. Ask for at most {total} clients")
    above = np.maximum(relative / relative.sum() * total - 1.0, 0.0)
    if above.sum() <= 0.0:
        return even_sizes(total, clients)
    return 1 + in_proportion(above, total - clients)


def in_proportion(weights: Floats, total: int) -> Ints:
    """Return whole numbers that sum to `total`, in proportion to weights >= 0, by largest remainders, int64 (k,)."""
    return largest_remainders(weights / weights.sum() * total, total)


def lognormal_sizes(clients: int, mean: float, sigma: float, law: str, generator: np.random.Generator) -> Ints:
    """Draw log-normal sizes of given mean, at least one sample each, int64 (N,).

    With L ~ LogNormal(0, sigma**2), `law` "paper" is max(1, round(mean L / E[L])), E[L] = exp(sigma**2 / 2). The mean
    is then `mean` plus the gain from sizes raised to one (2 becomes 2.17 at sigma = 1, 2.9 at sigma = 4). "code" is
    ceil(mean L / average(ceil L)), as in the authors' published code of FedSampling; its mean is only near `mean`.
    """
    draws = generator.lognormal(0.0, sigma, clients)
    with np.errstate(over="ignore", invalid="ignore"):
        if law == "code":
            sizes: Floats = np.ceil(mean * draws / np.ceil(draws).mean())
        else:
            sizes = np.maximum(np.rint(mean * draws / np.exp(sigma**2 / 2)), 1)
        countable = np.isfinite(draws.sum()) and sizes.sum() < MOST_SAMPLES
    if not countable:
        raise UserError(f"--mean {mean:g} and --sigma {sigma:g} make sizes overflow. Choose smaller values")
    return np.asarray(sizes, np.int64)


@register("partition", "lognormal")
def draw_lognormal(
    request: Request, *, mean: Positive = 2.0, sigma: NotNegative = 1.0, law: Literal["paper", "code"] = "paper"
) -> Partition:
    """Sizes ~ LogNormal scaled to a mean, at least one; random samples, scaled down if the data set is too small.

    FedSampling section 4.1 and its Figure 4 (sigma). If the sizes request fewer rows than there are, the other rows are
    dropped. `realized_mean` in the manifest is the mean of the drawn sizes.

    Parameters
    ----------
    mean : float
        Mean samples per client before sizes are rounded and raised to at least one; the partition sizes keeps its mean.
    sigma : float
        Standard deviation of the logarithm of the sizes.
    law : {"paper", "code"}
        With L ~ LogNormal(0, sigma^2), paper: max(1, round(mean L / E[L])); code: ceil(mean L / average ceil(L)).
    """
    clients, available = request.enough, len(request.labels)
    wanted = lognormal_sizes(clients, mean, sigma, law, request.generator)
    sizes = wanted if wanted.sum() <= available else whole_sizes(wanted.astype(np.float64), available)
    realized = round(float(sizes.mean()), 4)
    notes = [
        f"clients hold {realized:g} samples on average; --mean {mean:g} is the mean before sizes are rounded and "
        "raised to at least one"
    ]
    if wanted.sum() > available:
        notes.append(f"the sizes asked for {wanted.sum()} samples and were scaled to the {available} there are")
    rows, offsets = iid(available, sizes, request.generator)
    return Partition(rows, offsets, notes=tuple(notes), options={"realized_mean": realized})


@register("partition", "sizes")
def draw_sizes(
    request: Request, *, law: SizeLaw = "pareto", shape: Positive = 1.5, mean: NotNegative = 0.0
) -> Partition:
    """Sizes in proportion to random (lognormal, pareto) or ranked numbers (zipf, linear), at least one; random samples.

    Parameters
    ----------
    law : str
        Distribution of the sizes.
    shape : float
        Sigma (lognormal), tail index (pareto), exponent (zipf) or rate (exponential).
    mean : float
        Mean number of samples per client; 0 uses all samples.
    """
    clients, available = request.enough, len(request.labels)
    total = round(clients * mean) if mean else available
    if not clients <= total <= available:
        raise UserError(
            f"--mean {mean:g} asks for {total} samples for {clients} clients of {available} available. "
            f"Choose a mean from 1 to {available / clients:g}, or 0 for all samples"
        )
    relative = relative_sizes(law, clients, shape, request.generator)
    return Partition(*iid(available, whole_sizes(relative, total), request.generator))


@register("partition", "user", by_user=True, counts_clients=True)
def draw_by_user(request: Request, *, min_samples: Count = 1) -> Partition:
    """Make every natural user a client; with ``--clients`` N, only N random users.

    Parameters
    ----------
    min_samples : int
        Users with fewer samples are left out.
    """
    assert request.users is not None  # the registry requires users
    held = np.bincount(request.users)
    eligible = np.flatnonzero(held >= min_samples)
    clients = request.clients or len(eligible)
    if len(eligible) == 0 or clients > len(eligible):
        raise UserError(
            f"{len(eligible)} users hold at least {min_samples} samples. Ask for at most as many --clients or lower "
            "--min-samples"
        )
    chosen = np.sort(request.generator.permutation(eligible)[:clients])
    client_of = np.full(len(held), -1, np.int64)
    client_of[chosen] = np.arange(clients)
    return Partition(*group_by_owner(client_of[request.users], clients, request.generator), users=chosen)
