"""Partitions by size: log-normal sizes as in FedSampling, and other heavy-tailed laws; labels at random."""

from __future__ import annotations

from data_prep.partitions.common import Draw, Law, LawOption, Request
from data_prep.partitions.label_laws import enough
from data_prep.sizes import SIZE_LAWS, capped_sizes, lognormal_sizes, relative_sizes, whole_sizes
from fedmpi.common.errors import UserError
from fedmpi.data.assignment import iid

MEANT = "the mean before sizes are rounded and raised to at least one"


def draw_lognormal(request: Request) -> Draw:
    """Log-normal sizes (`data_prep.sizes.lognormal_sizes`), rows uniformly at random.

    Where the sizes ask for more rows than there are they are scaled down in proportion, none below one, to use all
    rows; where they ask for fewer the other rows are dropped. FedSampling section 4.1 and its Figure 4 (sigma).
    `mean` is that of the law before sizes are rounded and raised to one; what came out is told as `realised_mean`.
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
    """Sizes proportional to a size law (`data_prep.sizes.relative_sizes`), at least one; rows uniformly at random.

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
