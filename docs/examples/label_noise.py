"""Labels that some clients have wrong: python -m data_prep digits --label-noise label_noise:careless."""

import numpy as np


def careless(labels, owners, classes, generator, *, share: float = 0.3, often: float = 0.5) -> np.ndarray:
    """Some clients take a class for the one before it.

    Parameters
    ----------
    share : float
        Of clients that are careless.
    often : float
        How often one of them errs.
    """
    clients = int(owners.max()) + 1
    wrong = (generator.random(clients) < share)[owners] & (generator.random(len(labels)) < often)
    return np.where(wrong & (owners >= 0), (labels + classes - 1) % classes, labels)  # -1: nobody has the row
