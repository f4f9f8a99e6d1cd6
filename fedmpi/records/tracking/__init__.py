"""Programs that show runs while they last: TensorBoard, MLflow, Weights & Biases. Each hears of every round."""

from fedmpi.records.tracking.choice import Trackers, open_trackers, refuse_unusable

__all__ = ["Trackers", "open_trackers", "refuse_unusable"]
