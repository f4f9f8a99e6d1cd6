"""K-Vib (Zeng et al. 2023): clients.sampler = "kvib:Adaptive", server.weights = "unbiased"."""

import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(needs=("update_norm",))
class Adaptive:
    """Draw each client with a probability that grows with the sum of its squared past norms.

    Parameters
    ----------
    mixed : float
        Share of each probability that is equal for all clients.
    """

    state = ("feedback", "chance")

    def __init__(self, *, mixed: float = 0.3):
        self.mixed, self.feedback, self.chance = mixed, None, None

    def draw(self, view) -> Cohort:
        if self.feedback is None:
            self.feedback, self.chance = np.zeros((2, len(view.sizes)))
        new = view.age("update_norm") == 1
        self.feedback[new] += (view.sizes * view.last("update_norm"))[new] ** 2 / self.chance[new]
        scores = np.sqrt(self.feedback + self.feedback.mean() + 1e-12)[view.available]
        best = np.minimum(1, view.count * scores / scores.sum())
        equal = min(1, view.count / len(view.available))
        chance = (1 - self.mixed) * best + self.mixed * equal
        self.chance[view.available] = chance
        drawn = view.generator.random(len(chance)) < chance
        return Cohort(view.available[drawn], chance[drawn])
