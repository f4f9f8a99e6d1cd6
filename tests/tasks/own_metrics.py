"""Metrics as users write them, and some that go wrong."""

from __future__ import annotations

import torch


def entropy(outputs, targets, *, base: float = 2.0) -> dict:
    "Mean entropy of the probabilities."
    p = outputs.double().softmax(1)
    return {"entropy": -(p * p.log()).sum() / torch.log(torch.tensor(base, dtype=torch.float64)), "one": len(targets)}


class Recall:
    """The least of the classes' recalls, and that of one class."""

    def __init__(self, *, of: int = 0):
        self.of = of

    def __call__(self, outputs, targets):
        classes = outputs.shape[1]
        right = targets[outputs.argmax(1) == targets]
        return {"all": torch.bincount(targets, minlength=classes), "right": torch.bincount(right, minlength=classes)}

    def result(self, sums, samples):
        recall = sums["right"] / sums["all"]
        return {"least_recall": recall.min(), f"recall_of_{self.of}": recall[self.of]}


def wrecking(outputs, targets) -> dict:
    "Changes what it is given, and draws."
    outputs.zero_()
    targets.fill_(0)
    return {"noise": torch.rand(1).item() * 0 + 1}


def failing(outputs, targets) -> dict:
    "Raises."
    return {"x": 1 // 0}


def a_number(outputs, targets) -> dict:
    "No dictionary."
    return 3.0


def an_array(outputs, targets) -> dict:
    "An array without a result."
    return {"x": torch.ones(3)}


def known(outputs, targets) -> dict:
    "Metric that is measured already."
    return {"accuracy": 1}


class Changing:
    """Other sums in the second batch."""

    def __init__(self):
        self.asked = 0

    def __call__(self, outputs, targets):
        self.asked += 1
        return {f"x{self.asked}": 1}


class BadResult:
    """A result that is no number."""

    def __call__(self, outputs, targets):
        return {"x": 1}

    def result(self, sums, samples):
        return {"x": "large"}
