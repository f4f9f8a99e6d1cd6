"""An availability model: clients.availability = "availability:in_turns"."""

import numpy as np


def in_turns(view, *, others: float = 0.2) -> np.ndarray:
    """Make even clients available in even rounds and odd ones in odd rounds.

    Parameters
    ----------
    others : float
        Probability of the remaining clients.
    """
    turn = np.arange(len(view.sizes)) % 2 == view.round % 2
    return np.where(turn, 1.0, others)
