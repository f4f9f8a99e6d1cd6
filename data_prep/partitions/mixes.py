"""Partitions by the clients' own class mixes, drawn sample by sample: FedDyn's Dirichlet scheme, and Pachinko."""

from __future__ import annotations

import numpy as np

from data_prep.partitions import CountOrZero, NotNegative, Partition, Positive, Request
from data_prep.partitions.sizes import relative_sizes, whole_sizes
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.types import Bools, Floats, Ints
from fedmpi.data.assignment import Rows, even_sizes

_CELLS = 1 << 22  # bounds the memory of the mixes that are looked up at once


@register("partition", "inner-dirichlet", by_label=True)
def draw_inner_dirichlet(request: Request, *, alpha: Positive, sigma: NotNegative = 0.0) -> Partition:
    """Sizes are fixed first; each client's mix ~ Dir(alpha), and samples are drawn one at a time while classes last.

    D. A. E. Acar et al., Federated learning based on dynamic regularization (ICLR 2021), appendix, and its published
    code: a client with open requests is chosen uniformly. It draws a class from its mix, again if that class has run
    out, and takes a random sample of it. All rows are assigned.

    Parameters
    ----------
    alpha : float
        Concentration; small means few classes per client.
    sigma : float
        Sizes ~ LogNormal(0, sigma^2) in proportion, at least one; 0 makes them equal.
    """
    clients, available, generator = request.enough, len(request.labels), request.generator
    sizes = even_sizes(available, clients)
    if sigma:
        sizes = whole_sizes(relative_sizes("lognormal", clients, sigma, generator), available)
    mixes = generator.dirichlet(np.full(request.classes, alpha), size=clients)
    turns = random_turns(sizes, generator)
    drawn = draw_in_turn(turns, request.stock, mixes, generator)
    return Partition(*rows_of_turns(request.labels, turns, drawn, clients, generator))


def random_turns(sizes: Ints, generator: np.random.Generator) -> Ints:
    """Draw the client of each turn, uniformly among the clients that still need samples; int64 (n,).

    Clients ring independently at exponential intervals, so the next to ring is uniform among those that need samples.
    """
    owner = np.repeat(np.arange(len(sizes)), sizes)
    waited = np.cumsum(generator.standard_exponential(len(owner)))
    starts = np.concatenate(([0.0], waited))[np.cumsum(sizes) - sizes]
    return owner[np.argsort(waited - np.repeat(starts, sizes), kind="stable")]


@register("partition", "pachinko", needs="superclasses", by_label=True)
def draw_pachinko(
    request: Request, *, alpha: Positive = 0.1, beta: Positive = 10.0, size: CountOrZero = 0
) -> Partition:
    """Each client's mix of superclasses ~ Dir(alpha), of classes within ~ Dir(beta); clients draw in turn.

    S. Reddi et al., Adaptive federated optimization (ICLR 2021), appendix F, after W. Li and A. McCallum (ICML 2006).
    Each sample draws a superclass, then a class, then a row without replacement. A class that has run out is removed
    from its superclass, and a superclass without classes from the tree; the mixes are renormalized. The paper gives 500
    clients 100 samples each of CIFAR-100 with alpha = 0.1 and beta = 10.

    Parameters
    ----------
    alpha : float
        Concentration of the superclasses.
    beta : float
        Concentration of the classes within a superclass.
    size : int
        Samples per client; 0 shares all.
    """
    assert request.superclasses is not None  # the registry requires them
    clients, available = request.enough, len(request.labels)
    if clients * size > available:
        raise UserError(
            f"{clients} clients of {size} samples need {clients * size}, and there are {available}. Lower --size or "
            "--clients, or leave --size out to share all"
        )
    sizes = np.full(clients, size, np.int64) if size else even_sizes(available, clients)
    mixes = pachinko_mixes(request.superclasses, clients, alpha, beta, request.generator)
    turns = np.repeat(np.arange(clients), sizes)
    drawn = draw_in_turn(turns, request.stock, mixes, request.generator, request.superclasses)
    return Partition(*rows_of_turns(request.labels, turns, drawn, clients, request.generator))


def pachinko_mixes(families: Ints, clients: int, alpha: float, beta: float, generator: np.random.Generator) -> Floats:
    """Draw class mixes (N, C): the share of a superclass ~ Dir(alpha) times that of the class within it ~ Dir(beta).

    A class or superclass that has run out before a client's turn needs no other draw: a Dirichlet distribution
    restricted to some of its components and renormalized is the Dirichlet distribution of these components.
    """
    _, families = np.unique(families, return_inverse=True)
    roots = generator.dirichlet(np.full(int(families.max()) + 1, alpha), size=clients)
    mixes = np.empty((clients, len(families)))
    for family in range(roots.shape[1]):
        members = np.flatnonzero(families == family)
        within = generator.dirichlet(np.full(len(members), beta), size=clients)
        mixes[:, members] = roots[:, family, None] * within
    return mixes


def draw_in_turn(
    turns: Ints, stock: Ints, mixes: Floats, generator: np.random.Generator, families: Ints | None = None
) -> Ints:
    """Draw the classes of samples that clients take in turn, without replacement.

    The class of turn t is drawn from the mix of client ``turns[t]``, restricted to the classes with samples left: first
    within the family of each class, then among the families that have any left. If a client's mix has no mass on the
    remaining classes, the mix of the whole stock is used, restricted likewise, whatever the families.

    The draws are made together instead of sequentially, with the same distribution. All turns draw from the full mix.
    The turn at which a class runs out is found, and the later turns that drew it draw again from what is left; this
    repeats. A turn that drew another class keeps it: given that it is not the class that ran out, its distribution is
    the restricted mix.
    """
    if len(turns) > stock.sum():
        raise ValueError(f"{len(turns)} samples asked for, {stock.sum()} in stock")
    families = np.arange(len(stock)) if families is None else np.unique(families, return_inverse=True)[1]
    left = stock > 0
    drawn = np.empty(len(turns), np.min_scalar_type(len(stock)))
    places = np.arange(len(turns))
    drawn[:] = _again(places, turns, mixes, families, left, left, stock, generator)
    before = 0  # turns that are decided
    rest = stock.astype(np.int64)
    while True:
        tail = drawn[before:]
        counts = np.bincount(tail, minlength=len(stock))
        over = np.flatnonzero(counts > rest)
        if not len(over):
            return drawn.astype(np.int64)
        order = np.argsort(tail, kind="stable")
        beyond = order[offsets_of(counts)[over] + rest[over]]  # the first turn of each class that finds none left
        gone, turn = int(over[beyond.argmin()]), int(beyond.min())
        rest = rest - np.bincount(tail[:turn], minlength=len(stock))
        before += turn
        left[gone] = False
        late = before + np.flatnonzero(drawn[before:] == gone)
        relatives = left & (families == families[gone])
        drawn[late] = _again(late, turns, mixes, families, relatives, left, stock, generator)


def _again(
    late: Ints,
    turns: Ints,
    mixes: Floats,
    families: Ints,
    first: Bools,
    left: Bools,
    stock: Ints,
    generator: np.random.Generator,
) -> Ints:
    """Draw the classes of some turns again, from the mixes restricted to the classes `first`; families keep their mass.

    A client without mass on these draws from its mix restricted to the classes `left`, and if that has no mass either,
    from the mix of the whole stock.
    """
    everything = np.where(left, stock, 0).astype(np.float64)
    drawn = np.empty(len(late), np.int64)
    clients, whose = np.unique(turns[late], return_inverse=True)
    uniform = generator.random(len(late))
    step = max(1, _CELLS // len(stock))
    order = np.argsort(whose, kind="stable")
    cuts = np.searchsorted(whose[order], np.arange(0, len(clients) + step, step))
    for block, low in enumerate(range(0, len(clients), step)):
        own = mixes[clients[low : low + step]]
        mass = _restricted(own, families, first)
        nothing = mass.sum(axis=1) == 0
        mass[nothing] = _restricted(own[nothing], families, left)
        mass[mass.sum(axis=1) == 0] = everything
        ends = np.cumsum(mass, axis=1)
        ends /= ends[:, -1:]
        last = mass.shape[1] - 1 - (mass[:, ::-1] > 0).argmax(axis=1)
        mine = order[cuts[block] : cuts[block + 1]]
        row = whose[mine] - low
        flat = (ends + np.arange(len(ends))[:, None]).ravel()
        found = np.searchsorted(flat, uniform[mine] + row, side="right") - row * mass.shape[1]
        drawn[mine] = np.minimum(found, last[row])
    return drawn


def _restricted(mixes: Floats, families: Ints, among: Bools) -> Floats:
    """Restrict mixes (m, C) to some classes; every family with any of them keeps its mass."""
    mass = mixes * among
    count = int(families.max()) + 1
    if count == len(families):
        return mass
    belongs = np.zeros((len(families), count))
    belongs[np.arange(len(families)), families] = 1.0
    whole, kept = mixes @ belongs, mass @ belongs
    scale = np.divide(whole, kept, out=np.zeros_like(kept), where=kept > 0)
    restricted: Floats = mass * scale[:, families]
    return restricted


def rows_of_turns(labels: Ints, turns: Ints, drawn: Ints, clients: int, generator: np.random.Generator) -> Rows:
    """Return rows and offsets of clients from the classes of their turns: every turn gets a random row of its class."""
    classes = int(max(labels.max(initial=0), drawn.max(initial=0))) + 1
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = offsets_of(np.bincount(labels, minlength=classes))
    order = np.argsort(drawn, kind="stable")
    counts = np.bincount(drawn, minlength=classes)
    rank = np.arange(len(drawn)) - np.repeat(offsets_of(counts)[:-1], counts)
    rows = np.empty(len(drawn), np.int64)
    rows[order] = by_class[starts[drawn[order]] + rank]
    back = np.argsort(turns, kind="stable")
    return rows[back], offsets_of(np.bincount(turns, minlength=clients))
