"""Importance sampling of samples: samples.sampler = "sample_importance:sample_importance"."""

import numpy as np

from fedmpi import data_sampler


@data_sampler(needs=("sample_gradient_norm",))
def sample_importance(client, *, share: float = 0.2) -> np.ndarray:
    """Draw samples in proportion to a bound of their gradient norms (Katharopoulos and Fleuret 2018).

    Parameters
    ----------
    share : float
        Share of the samples to draw.
    """
    norm = np.maximum(client.fresh("sample_gradient_norm"), 1e-12)
    arrival = client.generator.exponential(1 / norm)  # the first ones are a sequential draw without replacement
    return np.sort(np.argsort(arrival)[: max(1, round(share * client.expected))])
