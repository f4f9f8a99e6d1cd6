"""Custom components that contradict some choices."""

import numpy as np

from fedmpi import client_sampler, data_sampler


@client_sampler(needs=("seconds",))
def by_seconds(view):
    """Draws by the seconds of past rounds."""
    return view


@client_sampler(needs=("update_norm",))
def by_norms(view):
    """Draws by the norms of the clients' own updates."""
    return view


@client_sampler(measures=("seconds",))
class SecondsOnTrial:
    """Draws by the seconds of its candidates."""

    def candidates(self, view):
        return view

    def draw(self, view):
        return view


@client_sampler(needs=("strata",))
def by_strata(view):
    """Draws from strata in a custom way."""
    return view


@data_sampler
def own_rows(client):
    """Rows of one client by itself."""
    return client


@data_sampler(pooled=True)
def pooled_rows(pool):
    """Rows of the whole cohort together."""
    return pool


@data_sampler
class WholeBatches(SecondsOnTrial):
    """Rows that make whole batches, which it therefore has to know."""

    def __init__(self, *, least: int = 2):
        self.least = least

    def __call__(self, client):
        return client

    def refuses(self, config):
        size = config.local.batch_size
        return f"batches of {size} rows are too small for it" if size != "all" and size < self.least else None


@data_sampler
class Fails(WholeBatches):
    """Component whose `refuses` raises an exception."""

    def refuses(self, config):
        return config.no_such_table


class Refusing:
    """An optimizer that is called with parameters, as those of torch.optim are."""

    def __init__(self, params, lr):
        self.params, self.lr = params, lr

    def refuses(self, config):
        return "never asked"


def larger_half(view):
    """Clients of at least the median's size are available."""
    return (view.sizes >= np.median(view.sizes)).astype(float)
