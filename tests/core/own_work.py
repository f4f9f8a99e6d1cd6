"""Samplers that set the work of each client, and data samplers that see the model."""

import numpy as np

from fedmpi import Cohort, client_sampler, data_sampler


def work_of(k: int, t: int, names: str) -> dict[str, float]:
    """Return the work of client k in round t."""
    work = {"steps": 1 + (k + t) % 3, "lr": 0.02 * (1 + k % 2), "budget": 3 + 40 * (k % 4)}
    return {name: work[name] for name in names.split("+")}


@client_sampler
def dealt(view, *, names: str = "steps+lr+budget", alone: bool = False) -> Cohort:
    """Select clients at random, unsorted, one of them twice; `alone` gives each client another learning rate."""
    drawn = view.generator.choice(view.available, min(view.count, len(view.available)), replace=False)
    drawn = np.append(drawn, drawn[:1])
    work = [work_of(int(k), view.round, names) for k in drawn]
    lists = {name: [own[name] for own in work] for name in names.split("+")}
    return Cohort(drawn, **lists | ({"lr": 0.01 + 1e-4 * drawn} if alone else {}))


@client_sampler
def uneven(view) -> Cohort:
    """Select two clients with different numbers of steps."""
    return Cohort([1, 3], inclusion=[0.5, 0.5], steps=[1, 2])


@data_sampler(needs=("sample_loss", "sample_gradient_norm"))
def hardest(client, *, share: float = 0.4) -> np.ndarray:
    """Use the share of the samples with the largest loss, and as many with the longest gradient."""
    count = int(np.ceil(share * len(client.labels)))
    chosen = [
        np.argsort(-client.fresh(name), kind="stable")[:count] for name in ("sample_loss", "sample_gradient_norm")
    ]
    return np.union1d(*chosen)


@data_sampler
def as_expected(client) -> np.ndarray:
    """Use the expected number of samples."""
    return np.sort(client.generator.choice(len(client.labels), int(client.expected), replace=False))
