"""Published feature shifts and label noise: python -m data_prep digits --feature-shift shifts:rotation."""

from typing import Literal

import numpy as np
from PIL import Image


def rotation(clients, generator, *, angles: str = "0,90,180,270"):
    """Rotate every client's images by one angle (Ghosh et al., NeurIPS 2020, section 6).

    Parameters
    ----------
    angles : str
        Degrees, counter-clockwise, separated by commas.
    """
    degrees = np.array([float(angle) for angle in angles.split(",")])
    turned = degrees[generator.permutation(clients) % len(degrees)]

    def turn(x: np.ndarray, client: int, generator) -> np.ndarray:
        if turned[client] % 90 == 0 and x.shape[1] == x.shape[2]:
            return np.rot90(x, int(turned[client]) // 90, axes=(1, 2))
        planes = [Image.fromarray(plane.astype(np.float32)).rotate(turned[client], Image.BILINEAR) for plane in x]
        return np.stack([np.asarray(plane) for plane in planes])

    return turn


def noise(clients, generator, *, level: float = 0.1):
    """Add normal noise of deviation level (k + 1) / N for client k (Li et al., ICDE 2022, section IV-B).

    Parameters
    ----------
    level : float
        Standard deviation of the last client, of images on the scale x / 255.
    """

    def noisy(x: np.ndarray, client: int, generator) -> np.ndarray:
        white = 255.0 if x.dtype == np.uint8 else 1.0
        return x + white * level * (client + 1) / clients * generator.standard_normal(x.shape)

    return noisy


def wrong_labels(
    labels, owners, classes, generator, *, noisy: float = 1.0, low: float = 0.5, to: Literal["any", "next"] = "any"
) -> np.ndarray:
    """Replace labels of noisy clients (Xu et al., FedCorr, CVPR 2022, section 4.1; Han et al., NeurIPS 2018).

    Parameters
    ----------
    noisy : float
        Probability that a client is noisy.
    low : float
        Lowest rate of a noisy client; the highest is 1.
    to : {"any", "next"}
        Any class, the true one included, or the next one.
    """
    clients = int(owners.max()) + 1
    rates = np.where(generator.random(clients) < noisy, generator.uniform(low, 1, clients), 0.0)
    wrong = (generator.random(len(labels)) < rates[owners]) & (owners >= 0)
    other = generator.integers(0, classes, len(labels)) if to == "any" else (labels + 1) % classes
    return np.where(wrong, other, labels)
