"""How many samples every client gets: size laws and their rounding to whole samples, vectorised over clients."""

from __future__ import annotations

import numpy as np

from fedmpi.common.apportionment import largest_remainders
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints
from fedmpi.data.assignment import even_sizes

MOST_SAMPLES = 1 << 53
"""Up to which floats count one by one."""
SIZE_LAWS = ("even", "lognormal", "pareto", "zipf", "linear", "square", "exponential")


def relative_sizes(law: str, clients: int, shape: float, generator: np.random.Generator) -> Floats:
    """Positive relative sizes of the clients, float64 (N,)."""
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
    if law == "exponential":
        return generator.permutation(np.exp(shape * (ranks - clients)))  # the largest is 1, whatever N
    raise UserError(f"there is no size law {law!r}: choose one of {', '.join(SIZE_LAWS)}")


def whole_sizes(relative: Floats, total: int) -> Ints:
    """Whole sizes of at least one that sum to `total`, in proportion to `relative`, int64 (N,).

    Every client has one sample; the others are shared in proportion to what the client's exact size has above one,
    by largest remainders.
    """
    clients = len(relative)
    if not np.isfinite(relative.sum()):
        raise UserError("the largest client is beyond all numbers: choose a milder one (--shape, or --sigma)")
    if total < clients:
        raise UserError(f"{total} samples cannot give {clients} clients one each: ask for at most {total} clients")
    above = np.maximum(relative / relative.sum() * total - 1.0, 0.0)
    if above.sum() <= 0.0:
        return even_sizes(total, clients)
    sizes: Ints = 1 + in_proportion(above, total - clients)
    return sizes


def in_proportion(weights: Floats, total: int) -> Ints:
    """Whole numbers proportional to non-negative weights that sum to `total`, by largest remainders, int64 (k,)."""
    return largest_remainders(weights / weights.sum() * total, total)


def lognormal_sizes(clients: int, mean: float, sigma: float, law: str, generator: np.random.Generator) -> Ints:
    """Log-normal sizes of given mean, at least one sample each, int64 (N,).

    Parameters
    ----------
    mean : float
        Wanted mean size.
    sigma : float
        Standard deviation of ln L.
    law : {"paper", "code"}
        With L ~ LogNormal(0, sigma**2): "paper" is max(1, round(mean L / E[L])), E[L] = exp(sigma**2 / 2), so the mean
        is `mean` plus what the sizes raised to one gain (2 becomes 2.17 at sigma = 1, 2.9 at sigma = 4); "code" is
        ceil(mean L / average(ceil L)), what the authors' published code of FedSampling does, whose mean is only near
        `mean`.

    Raises
    ------
    UserError
        Sizes beyond all numbers.
    """
    draws = generator.lognormal(0.0, sigma, clients)
    with np.errstate(over="ignore", invalid="ignore"):
        if law == "code":
            sizes: Floats = np.ceil(mean * draws / np.ceil(draws).mean())
        else:
            sizes = np.maximum(np.rint(mean * draws / np.exp(sigma**2 / 2)), 1)
        countable = np.isfinite(draws.sum()) and sizes.sum() < MOST_SAMPLES
    if not countable:
        raise UserError(f"--mean {mean:g} and --sigma {sigma:g} make sizes beyond all numbers: choose smaller ones")
    return np.asarray(sizes, np.int64)


def capped_sizes(sizes: Ints, available: int) -> Ints:
    """The sizes, or, where they ask for more than is available, the sizes in proportion with that total."""
    total = int(sizes.sum())
    return sizes if total <= available else whole_sizes(sizes.astype(np.float64), available)
