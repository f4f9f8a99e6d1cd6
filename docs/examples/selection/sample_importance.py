"""Importance sampling of samples: samples.sampler = "sample_importance:sample_importance"."""

import numpy as np

from fedmpi import data_sampler, draw_without_replacement


@data_sampler(needs=("sample_gradient_norm",))
def sample_importance(client, *, share: float = 0.2) -> np.ndarray:
    """Draw samples in proportion to a bound of their gradient norms (Katharopoulos and Fleuret 2018).

    Parameters
    ----------
    share : float
        Share of the samples to draw.
    """
    count = max(1, round(share * client.expected))
    return draw_without_replacement(client.generator, client.fresh("sample_gradient_norm"), count)
