"""A metric of one's own: task.metrics = ["metric:coverage"]."""

from torch import Tensor


def coverage(outputs: Tensor, targets: Tensor, *, least: float = 0.5) -> dict[str, Tensor]:
    """How often the model is sure, and how often it is sure and right.

    Parameters
    ----------
    least : float
        Probability from which on it counts as sure.
    """
    probability, guess = outputs.softmax(1).max(1)
    sure = probability >= least
    return {"sure": sure.sum(), "sure_and_right": (sure & (guess == targets)).sum()}
