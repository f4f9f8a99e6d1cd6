"""The server's step: aggregation.optimizer = "server_optimizer:Averaged"."""

from fedmpi import server_optimizer


@server_optimizer
class Averaged:
    """Momentum whose steps keep the length of a plain one: m ← β m + (1 − β) Δ, w ← w + m.

    Parameters
    ----------
    beta : float
        β, how much of the last step stays.
    """

    state = ("m",)  # vectors like the model, zero at first, kept in checkpoints

    def __init__(self, *, beta: float = 0.5):
        self.beta = beta

    def step(self, w, update):
        self.m.mul_(self.beta).add_(update, alpha=1 - self.beta)
        w.add_(self.m)
