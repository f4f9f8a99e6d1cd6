"""Partitions by size (log-normal as in FedSampling, and others; labels at random), and by an attribute of the rows.

Sizes are whole numbers of at least one, vectorised over clients.
"""

from __future__ import annotations

import numpy as np

from data_prep.partitions.base import Draw, Law, LawOption, Request, enough
from fedmpi.common.apportionment import largest_remainders
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints
from fedmpi.data.assignment import even_sizes, group_by_owner, iid

MOST_SAMPLES = 1 << 53
"""Largest number up to which floats represent every whole number."""
SIZE_LAWS = ("even", "lognormal", "pareto", "zipf", "linear", "square", "exponential")
MEANT = "the mean before sizes are rounded and raised to at least one"


def relative_sizes(law: str, clients: int, shape: float, generator: np.random.Generator) -> Floats:
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
    if law == "exponential":
        return generator.permutation(np.exp(shape * (ranks - clients)))  # the largest is 1, whatever N
    raise UserError(f"there is no size law {law!r}: choose one of {', '.join(SIZE_LAWS)}")


def whole_sizes(relative: Floats, total: int) -> Ints:
    """Return whole sizes of at least one that sum to `total`, in proportion to `relative`, int64 (N,).

    Every client has one sample. The others are shared by largest remainders, in proportion to the part of a client's
    exact size above one.
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
    """Return whole numbers that sum to `total`, in proportion to weights >= 0, by largest remainders, int64 (k,)."""
    return largest_remainders(weights / weights.sum() * total, total)


def lognormal_sizes(clients: int, mean: float, sigma: float, law: str, generator: np.random.Generator) -> Ints:
    """Draw log-normal sizes of given mean, at least one sample each, int64 (N,).

    Parameters
    ----------
    mean : float
        Requested mean size.
    sigma : float
        Standard deviation of ln L.
    law : {"paper", "code"}
        With L ~ LogNormal(0, sigma**2): "paper" is max(1, round(mean L / E[L])), E[L] = exp(sigma**2 / 2). The mean is
        then `mean` plus the gain from sizes raised to one (2 becomes 2.17 at sigma = 1, 2.9 at sigma = 4). "code" is
        ceil(mean L / average(ceil L)), as in the authors' published code of FedSampling; its mean is only near `mean`.

    Raises
    ------
    UserError
        The sizes exceed the range of numbers.
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
    """Return the sizes, scaled down in proportion if they request more than is available."""
    total = int(sizes.sum())
    return sizes if total <= available else whole_sizes(sizes.astype(np.float64), available)


def draw_lognormal(request: Request) -> Draw:
    """Draw log-normal sizes (`lognormal_sizes`) and assign rows uniformly at random.

    If the sizes request more rows than there are, they are scaled down in proportion, none below one, to use all rows.
    If they request fewer, the other rows are dropped. FedSampling section 4.1 and its Figure 4 (sigma). `mean` is that
    of the distribution before sizes are rounded and raised to one; `realised_mean` reports the mean of the drawn sizes.
    """
    clients, available = enough(request), len(request.labels)
    wanted = lognormal_sizes(
        clients, request.number("mean"), request.number("sigma"), str(request.options["law"]), request.generator
    )
    sizes = capped_sizes(wanted, available)
    realised = round(float(sizes.mean()), 4)
    notes = [f"clients hold {realised:g} samples on average; --mean {request.number('mean'):g} is {MEANT}"]
    if wanted.sum() > available:
        notes.append(f"the sizes asked for {wanted.sum()} samples and were scaled to the {available} there are")
    rows, offsets = iid(available, sizes, request.generator)
    return Draw(rows, offsets, notes=tuple(notes), facts={"realised_mean": realised})


def draw_sizes(request: Request) -> Draw:
    """Draw sizes proportional to a size distribution (`relative_sizes`), at least one; rows uniformly at random.

    All rows are used, or N times `mean` of them.
    """
    clients, available = enough(request), len(request.labels)
    mean = request.number("mean")
    total = round(clients * mean) if mean else available
    if not clients <= total <= available:
        raise UserError(
            f"--mean {mean:g} asks for {total} samples for {clients} clients of {available} available: "
            f"choose a mean from 1 to {available / clients:g}, or 0 for all samples"
        )
    relative = relative_sizes(str(request.options["law"]), clients, request.number("shape"), request.generator)
    return Draw(*iid(available, whole_sizes(relative, total), request.generator))


def draw_by_attribute(request: Request) -> Draw:
    """Sort rows by an attribute blurred with noise and cut them into N clients whose sizes differ by at most one.

    The order is that of s z + (1 - s) e, with z the standardised attribute, e ~ N(0, 1) independent for each row and s
    the `strictness`. 1 sorts by the attribute itself (rows of equal value in random order), 0 equals the partition iid.
    This is the scheme of the ContinuousPartitioner of Flower Datasets. The order of the clients is random.
    """
    assert request.attribute is not None  # the registry requires it
    clients, strictness = enough(request), request.number("strictness")
    if strictness > 1:
        raise UserError(f"--strictness {strictness:g} is impossible: give a number from 0 to 1")
    name = str(request.options["attribute"])
    values = request.attribute(name)
    if (wrong := np.flatnonzero(~np.isfinite(values))).size:
        raise UserError(f"--attribute {name}: row {wrong[0]} has no finite value: choose another or mend the data")
    spread = values.std()
    if not spread > 0:
        raise UserError(f"--attribute {name} is {values[0]:g} for every row: choose another")
    noise = request.generator.standard_normal(len(values))
    score = strictness * (values - values.mean()) / spread + (1 - strictness) * noise
    order = np.lexsort((noise, score))
    sizes = even_sizes(len(values), clients)
    place = request.generator.permutation(clients)  # the clients in the order of the attribute
    owner = np.empty(len(values), np.int64)
    owner[order] = np.repeat(place, sizes[place])
    return Draw(*group_by_owner(owner, clients, request.generator))


LOGNORMAL = Law(
    draw_lognormal,
    "sizes ~ LogNormal scaled to a mean, at least one; rows at random; scaled down where the data set is too small",
    (
        LawOption("mean", float, 2.0, f"samples of a client, {MEANT}; the partition sizes keeps its mean", low=0.01),
        LawOption("sigma", float, 1.0, "standard deviation of the logarithm of the sizes", low=0.0),
        LawOption(
            "law",
            str,
            "paper",
            "with L ~ LogNormal(0, sigma^2), paper: max(1, round(mean L / E[L])); code: ceil(mean L / average ceil(L))",
            ("paper", "code"),
        ),
    ),
    drops=True,
)
SIZES = Law(
    draw_sizes,
    "sizes in proportion to random (lognormal, pareto) or ranked numbers (zipf, linear), at least one; rows at random",
    (
        LawOption("law", str, "pareto", "law of the sizes", SIZE_LAWS),
        LawOption(
            "shape",
            float,
            1.5,
            "sigma (lognormal), tail index (pareto), exponent (zipf) or rate (exponential)",
            low=1e-3,
        ),
        LawOption("mean", float, 0.0, "mean number of samples of a client; 0 uses all samples", low=0.0),
    ),
    drops=True,
)
ATTRIBUTE = Law(
    draw_by_attribute,
    "rows sorted by a continuous attribute blurred with noise and cut into N equal clients",
    (
        LawOption("attribute", str, None, "mean or std of a sample's features, length of a text, or a column's name"),
        LawOption("strictness", float, 1.0, "1: sorted by the attribute alone; 0: at random", low=0.0),
    ),
    needs="attributes",
)
