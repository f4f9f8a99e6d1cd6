"""A custom metric: task.metrics = ["metric:coverage"]."""

from torch import Tensor


def coverage(outputs: Tensor, targets: Tensor, *, least: float = 0.5) -> dict[str, Tensor]:
    """Count confident predictions, and correct ones among them.

    Parameters
    ----------
    least : float
        Smallest probability of a confident prediction.
    """
    probability, guess = outputs.softmax(1).max(1)
    sure = probability >= least
    return {"sure": sure.sum(), "sure_and_right": (sure & (guess == targets)).sum()}
