"""Partitions by the clients' own class mixes, drawn sample by sample: FedDyn's Dirichlet law, and Pachinko."""

from __future__ import annotations

import numpy as np

from data_prep.partitions.common import Draw, Law, LawOption, Request
from data_prep.partitions.in_turn import draw_in_turn, rows_of_turns
from data_prep.partitions.label_laws import enough
from data_prep.sizes import relative_sizes, whole_sizes
from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints
from fedmpi.data.assignment import even_sizes


def draw_inner_dirichlet(request: Request) -> Draw:
    """Sizes are fixed first; every client's class mix ~ Dir(alpha); samples are then drawn one at a time.

    D. A. E. Acar et al., Federated learning based on dynamic regularization (ICLR 2021), appendix, and its published
    code: a client that still wants a sample is chosen uniformly, draws a class from its mix, again where that class
    has run out, and takes a random sample of it. Sizes: balanced, differing by at most one (`sigma` = 0), else
    ~ LogNormal(0, sigma^2) in proportion, at least one. All rows are given out.
    """
    clients, available = enough(request), len(request.labels)
    sigma, generator = request.number("sigma"), request.generator
    sizes = even_sizes(available, clients)
    if sigma:
        sizes = whole_sizes(relative_sizes("lognormal", clients, sigma, generator), available)
    mixes = generator.dirichlet(np.full(request.classes, request.number("alpha")), size=clients)
    turns = random_turns(sizes, generator)
    drawn = draw_in_turn(turns, np.bincount(request.labels, minlength=request.classes), mixes, generator)
    return Draw(*rows_of_turns(request.labels, turns, drawn, clients, generator))


def random_turns(sizes: Ints, generator: np.random.Generator) -> Ints:
    """Whose turn it is when, of the clients that still want samples, one is chosen uniformly each time; int64 (n,).

    Clients ring independently at exponential intervals: who of those that still want samples rings next is uniform.
    """
    owner = np.repeat(np.arange(len(sizes)), sizes)
    waited = np.cumsum(generator.standard_exponential(len(owner)))
    starts = np.concatenate(([0.0], waited))[np.cumsum(sizes) - sizes]
    return owner[np.argsort(waited - np.repeat(starts, sizes), kind="stable")]


def draw_pachinko(request: Request) -> Draw:
    """The Pachinko allocation of a data set whose classes belong to superclasses, e.g. CIFAR-100's 20.

    S. Reddi et al., Adaptive federated optimization (ICLR 2021), appendix F, after W. Li and A. McCallum (ICML 2006).
    Client after client: a mix of the superclasses ~ Dir(alpha) and, within each, one of its classes ~ Dir(beta); each
    of its samples is of a superclass, then a class, then a row drawn without replacement. A class that has run out
    leaves its superclass, and a superclass without classes the tree; the mixes are renormalised. The paper gives 500
    clients 100 samples each of CIFAR-100 with alpha = 0.1 and beta = 10.
    """
    assert request.superclasses is not None  # the registry asks for them
    clients, size = enough(request), request.integer("size")
    if clients * size > len(request.labels):
        raise UserError(
            f"{clients} clients of {size} samples need {clients * size}, and there are {len(request.labels)}: lower "
            "--size or --clients, or leave --size out to share all"
        )
    sizes = np.full(clients, size, np.int64) if size else even_sizes(len(request.labels), clients)
    mixes = pachinko_mixes(
        request.superclasses, clients, request.number("alpha"), request.number("beta"), request.generator
    )
    turns = np.repeat(np.arange(clients), sizes)
    stock = np.bincount(request.labels, minlength=request.classes)
    drawn = draw_in_turn(turns, stock, mixes, request.generator, request.superclasses)
    return Draw(*rows_of_turns(request.labels, turns, drawn, clients, request.generator))


def pachinko_mixes(families: Ints, clients: int, alpha: float, beta: float, generator: np.random.Generator) -> Floats:
    """Class mixes (N, C): the share of a superclass ~ Dir(alpha) times that of the class within it ~ Dir(beta).

    A class or superclass that has run out before a client's turn needs no other draw: a Dirichlet law restricted to
    some of its parts and renormalised is the Dirichlet law of these parts.
    """
    _, families = np.unique(families, return_inverse=True)
    roots = generator.dirichlet(np.full(int(families.max()) + 1, alpha), size=clients)
    mixes = np.empty((clients, len(families)))
    for family in range(roots.shape[1]):
        members = np.flatnonzero(families == family)
        within = generator.dirichlet(np.full(len(members), beta), size=clients)
        mixes[:, members] = roots[:, family, None] * within
    return mixes


INNER_DIRICHLET = Law(
    draw_inner_dirichlet,
    "sizes fixed first; each client's mix ~ Dir(alpha), samples drawn one at a time while classes last; all rows used",
    (
        LawOption("alpha", float, None, "concentration; small means few classes a client", low=1e-4),
        LawOption("sigma", float, 0.0, "sizes ~ LogNormal(0, sigma^2) in proportion; 0: equal sizes", low=0.0),
    ),
    by_label=True,
)
PACHINKO = Law(
    draw_pachinko,
    "each client's mix of superclasses ~ Dir(alpha), of classes within ~ Dir(beta); samples drawn client by client",
    (
        LawOption("alpha", float, 0.1, "concentration of the superclasses", low=1e-4),
        LawOption("beta", float, 10.0, "concentration of the classes within a superclass", low=1e-4),
        LawOption("size", int, 0, "samples of a client; 0 shares all", low=0),
    ),
    needs="superclasses",
    drops=True,
    by_label=True,
)
