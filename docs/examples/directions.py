"""Features of clients: clients.sampler.features = "directions:directions"."""

import numpy as np

from fedmpi import features


@features(needs="gradient")
def directions(gradients: np.ndarray, *, last: int = 200) -> np.ndarray:
    """Use the direction of each gradient's last values, those of the output layer.

    Parameters
    ----------
    last : int
        Number of values.
    """
    tail = gradients[:, -last:]
    return tail / np.linalg.norm(tail, axis=1, keepdims=True).clip(1e-12)
