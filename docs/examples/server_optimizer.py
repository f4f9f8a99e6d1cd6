"""A server optimizer: server.optimizer = "server_optimizer:Averaged"."""

from fedmpi import server_optimizer


@server_optimizer
class Averaged:
    """Momentum with averaged updates: m ← β m + (1 − β) Δ, w ← w + m.

    Parameters
    ----------
    beta : float
        Share of the last step that is kept.
    """

    state = ("m",)  # model-sized vectors, initially zero, kept in checkpoints

    def __init__(self, *, beta: float = 0.5):
        self.beta = beta

    def step(self, w, update):
        self.m.mul_(self.beta).add_(update, alpha=1 - self.beta)
        w.add_(self.m)
