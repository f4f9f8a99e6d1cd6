"""Feature shifts and label noise: what clients, validation and test part get, and what is rejected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpi import ComponentFailure
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHIFT, NOISE = "--feature-shift", "--label-noise"
OWN = """
def large(clients, generator):
    return lambda x, client, generator: x.astype(float) + 300 * (client % 2)

def short(clients, generator):
    return lambda x, client, generator: x[..., 1:]

def nothing(clients, generator):
    return None

def beyond(labels, owners, classes, generator):
    return labels + 1

def few(labels, owners, classes, generator):
    return labels[:3]
"""


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prepare digits for four clients; return clients' samples, validation and test part."""
    (tmp_path / "own_shifts.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), str(tmp_path), *sys.path])

    def prepared(*words: str, data: tuple[str, ...] = ("digits",)) -> Any:
        command = [*data, "--partition", "iid", "--clients", "4", "--val", "0.2", *words]
        assert main([*command, "--out", str(tmp_path / "out"), "--overwrite"]) == 0
        store = open_store(tmp_path / "out")
        return [tuple(map(np.array, store.client(k))) for k in range(4)], store.validation(), store.test(), store

    return prepared


def test_each_client_sees_its_images_turned_and_the_test_part_is_upright(prepare: Any) -> None:
    plain, val, test, _ = prepare()
    turned, turned_val, turned_test, store = prepare(SHIFT, "shifts:rotation")
    quarters = {
        next(q for q in range(4) if np.array_equal(np.rot90(x, q, axes=(2, 3)), shifted[0]))
        for (x, _), shifted in zip(plain, turned, strict=True)
    }
    assert quarters == {0, 1, 2, 3}  # each angle has equally many clients
    np.testing.assert_array_equal(test[0], turned_test[0])
    assert not np.array_equal(val[0], turned_val[0]) and np.array_equal(val[1], turned_val[1])
    x = np.concatenate([x for x, _ in turned]) / 255
    assert store.description.mean == pytest.approx([x.mean()]) and "features shifted" in " ".join(store.manifest.notes)


def test_noise_grows_with_the_client_and_each_sample_has_its_own(prepare: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((40, 4), np.float32), y=np.arange(40) % 2)
    vectors, *_ = prepare(SHIFT, "shifts:noise", data=("arrays", "--raw", str(tmp_path / "a.npz")))
    rows = np.concatenate([x for x, _ in vectors])
    assert len(np.unique(rows, axis=0)) == len(rows)
    plain, *_ = prepare()
    noisy, *_ = prepare(SHIFT, "shifts:noise", "--level", "0.05")
    spread = [(n.astype(float) - p)[(p > 0) & (n > 0)].std() for (p, _), (n, _) in zip(plain, noisy, strict=True)]
    assert spread == sorted(spread) and spread[-1] > 1.5 * spread[0]
    again, *_ = prepare(SHIFT, "shifts:noise", "--level", "0.05", "--shards", "3")
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(noisy, again, strict=True))
    large, *_ = prepare(SHIFT, "own_shifts:large")
    assert [int(x.min()) for x, _ in large] == [0, 255, 0, 255]  # bytes are clipped


@pytest.mark.parametrize(("to", "share"), [("any", 0.9), ("next", 1.0)])
def test_labels_of_clients_are_wrong_and_those_of_validation_and_test_part_are_not(
    prepare: Any, to: str, share: float
) -> None:
    plain, val, test, _ = prepare()
    noisy, noisy_val, noisy_test, store = prepare(NOISE, "shifts:wrong_labels", "--low", "1", "--to", to)
    wrong = np.concatenate([a[1] != b[1] for a, b in zip(plain, noisy, strict=True)])
    assert abs(wrong.mean() - share) < 0.05  # five standard errors are 0.045
    assert np.array_equal(val[1], noisy_val[1]) and np.array_equal(test[1], noisy_test[1])
    assert any(f"{wrong.sum():,} of {len(wrong):,} training labels" in note for note in store.manifest.notes)
    assert store.class_counts().sum() == len(wrong)
    counts = np.stack([np.bincount(y, minlength=10) for _, y in noisy])
    np.testing.assert_array_equal(store.class_counts(), counts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((SHIFT, "own_shifts:short"), "as many finite numbers"),
        ((SHIFT, "own_shifts:nothing"), "return a function"),
        ((NOISE, "own_shifts:beyond"), "returned labels from 1 to 10"),
        ((NOISE, "own_shifts:few"), "the label of each of the 1442 rows"),
    ],
)
def test_a_useless_answer_names_the_component(prepare: Any, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ComponentFailure, match=message):
        prepare(*words)


def test_data_that_cannot_be_changed_are_rejected(
    prepare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"word {row},{row % 2}\n" for row in range(30)))
    np.savez(tmp_path / "a.npz", x=np.eye(30), y=np.random.default_rng(0).random((30, 2)))
    for raw, words in (("t.csv", (SHIFT, "own_shifts:large")), ("a.npz", (NOISE, "own_shifts:few"))):
        with pytest.raises(AssertionError):
            prepare(*words, data=("arrays", "--raw", str(tmp_path / raw)))
        assert "Leave it out" in capsys.readouterr().err
