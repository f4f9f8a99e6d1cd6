"""A few real samples for the model tests: digits blown up to any size, titles of MIND news when the folder is there."""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from fedmpi.data.schema import DataDescription


def data_folder() -> Path:
    named = os.environ.get("FEDMPI_DATA")
    return Path(named) if named else Path(__file__).parents[3] / "shared" / "data"


def describe_images(channels: int, side: int, classes: int) -> DataDescription:
    return DataDescription((channels, side, side), "uint8", classes, "image", 0, (0.5,) * channels, (0.5,) * channels)


def describe_texts(length: int, vocabulary: int, classes: int) -> DataDescription:
    return DataDescription((length,), "int32", classes, "text", vocabulary, (), ())


def digits(count: int, channels: int, side: int) -> tuple[Tensor, Tensor]:
    """The first handwritten digits of scikit-learn, interpolated to side × side, values around 0."""
    bunch = load_digits()
    images = torch.tensor(bunch.images[:count, None] / 8.0 - 1.0, dtype=torch.float32)
    images = torch.nn.functional.interpolate(images, size=(side, side), mode="bilinear")
    return images.expand(-1, channels, -1, -1).contiguous(), torch.from_numpy(bunch.target[:count]).long()


def news_titles(count: int, length: int) -> tuple[Tensor, Tensor, int]:
    """Token ids (0 = padding), topics and vocabulary size of the first news of MIND."""
    path = data_folder() / "mind" / "MINDsmall_train_sample2000" / "news.tsv.gz"
    if not path.exists():
        pytest.skip(f"no MIND news at {path}; set FEDMPI_DATA")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(islice(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), count))
    words = [re.findall(r"\w+", row[3].lower())[:length] for row in rows]
    ids = {word: number for number, (word, _) in enumerate(Counter(sum(words, [])).most_common(), 1)}
    topics = sorted({row[1] for row in rows})
    tokens = np.zeros((count, length), np.int32)
    for line, text in enumerate(words):
        tokens[line, : len(text)] = [ids[word] for word in text]
    labels = torch.tensor([topics.index(row[1]) for row in rows])
    return torch.from_numpy(tokens), labels, len(ids) + 1


def loss_after_steps(module: torch.nn.Module, x: Tensor, y: Tensor, lr: float) -> tuple[float, float]:
    """The loss before and after one plain step on the whole batch, without dropout."""
    module.eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    before = torch.nn.functional.cross_entropy(module(x), y)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, torch.autograd.grad(before, parameters), strict=True):
            parameter.sub_(gradient, alpha=lr)
        after = torch.nn.functional.cross_entropy(module(x), y)
    return before.item(), after.item()
