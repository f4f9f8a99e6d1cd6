"""Steps of one's own: local.optimizer = "local_optimizer:nesterov"."""

from torch.optim import SGD


def nesterov(parameters, *, lr: float, momentum: float = 0.5) -> SGD:
    """SGD with Nesterov's momentum, made afresh for every client and round.

    Parameters
    ----------
    momentum : float
        How much of the last step is taken again.
    """
    return SGD(parameters, lr=lr, momentum=momentum, nesterov=True)
