"""A data set reader: python -m data_prep data_set:waves."""

import numpy as np


def waves(*, count: int = 600, noise: float = 0.3) -> dict[str, np.ndarray]:
    """Return sine waves of three frequencies, twenty from each sensor.

    Parameters
    ----------
    count : int
        Number of waves.
    noise : float
        Standard deviation of the noise on each of the 32 values.
    """
    generator = np.random.default_rng(7)
    y = np.arange(count) % 3
    phase = generator.uniform(0, 2 * np.pi, (count, 1))
    x = np.sin(phase + (y[:, None] + 1) * np.linspace(0, 2 * np.pi, 32))
    x += noise * generator.standard_normal(x.shape)
    return {"x": x, "y": y, "user": np.arange(count) // 20}
