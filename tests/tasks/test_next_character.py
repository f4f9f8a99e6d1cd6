"""The next character of a text of a few hundred kilobytes, spoken by clients of their own words, is learned."""

from __future__ import annotations

import numpy as np
import pytest

import fedmpi

SPEAKERS, LINES, LENGTH = 24, 240, 40
LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def word(generator: np.random.Generator) -> str:
    """Consonants and vowels in turn."""
    length = int(generator.integers(2, 8))
    return "".join(generator.choice(list("aeiou" if place % 2 else "bcdfglmnrst")) for place in range(length))


def lines_of_speakers() -> tuple[np.ndarray, np.ndarray]:
    """Lines of LENGTH + 1 characters as codes, and who says each: everybody has 40 words of one lexicon of 150."""
    generator = np.random.default_rng(12)
    lexicon = [word(generator) for _ in range(150)]
    lines = np.empty((SPEAKERS * LINES, LENGTH + 1), np.int64)
    for speaker in range(SPEAKERS):
        own, text = generator.choice(lexicon, 40), ""
        while len(text) < LINES * (LENGTH + 1):
            text += " ".join(generator.choice(own, int(generator.integers(3, 9)))) + ". "
        codes = np.array([LETTERS.index(letter) for letter in text[: LINES * (LENGTH + 1)]])
        lines[speaker * LINES : (speaker + 1) * LINES] = codes.reshape(LINES, LENGTH + 1)
    return lines, np.repeat(np.arange(SPEAKERS), LINES)


def unigram_entropy(codes: np.ndarray) -> float:
    """In nats: what telling the next character by its frequency alone costs at the least."""
    shares = np.bincount(codes.ravel()) / codes.size
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lr"), [({"name": "char-lstm", "units": 48, "layers": 1}, 3.0), ({"name": "causal-transformer"}, 0.2)]
)
def test_it_is_predicted_better_than_by_frequency(model: dict, lr: float):
    lines, owner = lines_of_speakers()
    assert lines.size > 200_000
    held = np.arange(len(lines)) % 12 == 0
    x, y = lines[:, :-1], lines[:, 1:]
    data = fedmpi.ClientArrays(
        x[~held], y[~held], owner[~held], test=(x[held], y[held]), task="text", vocabulary=len(LETTERS)
    )
    small = {"dimension": 32, "layers": 1} if model["name"] == "causal-transformer" else {}
    settings = {
        "rounds": 8,
        "participation.count": 6,
        "task.kind": "tokens",
        "local.epochs": 1,
        "local.batch_size": 10,
        "local.lr": lr,
        "evaluation.every": 8,
        "cluster.threads": 1,
        "model": {**model, **small},
    }
    final = fedmpi.run("fedavg", settings, data=data).records[-1]
    entropy = unigram_entropy(lines[held][:, 1:])
    assert final["test_loss"] < 0.95 * entropy, (final["test_loss"], entropy)
    assert final["test_perplexity"] == pytest.approx(np.exp(final["test_loss"]), rel=1e-6)
