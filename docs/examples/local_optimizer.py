"""A local optimizer: local.optimizer = "local_optimizer:nesterov"."""

from torch.optim import SGD


def nesterov(parameters, *, lr: float, momentum: float = 0.5) -> SGD:
    """Return SGD with Nesterov momentum.

    Parameters
    ----------
    momentum : float
        Momentum factor.
    """
    return SGD(parameters, lr=lr, momentum=momentum, nesterov=True)
