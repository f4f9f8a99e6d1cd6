"""Who is there: system.availability = "availability:in_turns"."""

import numpy as np


def in_turns(view, *, others: float = 0.2) -> np.ndarray:
    """Even clients are there in even rounds, odd ones in odd rounds, the others by chance.

    Parameters
    ----------
    others : float
        Probability of those whose turn it is not.
    """
    turn = np.arange(len(view.sizes)) % 2 == view.round % 2
    return np.where(turn, 1.0, others)
