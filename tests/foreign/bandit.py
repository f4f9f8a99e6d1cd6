import numpy as np

from fedmpi import Cohort, client_sampler


@client_sampler(measures=("loss", "accuracy"))
class Bandit:
    """Candidates by an upper confidence bound on what was measured so far; the hardest of them train."""

    state = ("value", "pulls")

    def __init__(self, *, pool: int = 6, explore: float = 0.5):
        self.pool = pool
        self.explore = explore
        self.value = None
        self.pulls = None

    def candidates(self, view):
        n = len(view.sizes)
        if self.value is None:
            self.value, self.pulls = np.zeros(n), np.zeros(n)
        bound = self.value + self.explore * np.sqrt(np.log(view.round + 2) / (self.pulls + 0.1))
        bound = bound[view.available] + 1e-6 * view.generator.random(len(view.available))
        k = min(max(self.pool, view.count), len(view.available))
        return np.sort(view.available[np.argsort(-bound)[:k]])

    def draw(self, view):
        loss = view.fresh("loss")
        seen = np.flatnonzero(~np.isnan(loss))
        self.value[seen] = 0.5 * self.value[seen] + 0.5 * loss[seen]
        self.pulls[seen] += 1
        hard = loss[seen] * (1.5 - view.fresh("accuracy")[seen])
        return Cohort(np.sort(seen[np.argsort(-hard, kind="stable")[: view.count]]))
