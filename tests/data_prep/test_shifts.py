"""Features shifted and labels made noisy client by client: what changes, by how much, and what stays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpi import ComponentFailure
from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore
from tests.data.validation import validation_of
from tests.data_prep.command import main

Z = 5.0
"""Critical value of a normal statistic: a false-alarm rate of 6e-7 each."""
DIGITS = ["digits", "--partition", "iid", "--clients", "12", "--val", "0.25"]
VECTORS = ["arrays", "--raw", "rows.npz", "--partition", "iid", "--clients", "2", "--task", "vector"]
TEXTS = [*VECTORS[:-1], "text"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def prepared(*words: str, out: str = "shards") -> ShardStore:
    assert main([*words, "--out", out]) == 0
    return open_store(out, verify=True)


def every_row(store: ShardStore) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Client, training and validation features, training and validation labels."""
    found = []
    for client in range(store.clients):
        x, y = store.client(client)
        held_x, held_y = validation_of(store, client)
        found.append((client, np.asarray(x), np.asarray(held_x), np.asarray(y), np.asarray(held_y)))
    return found


def test_every_client_sees_its_images_turned_by_its_angle(place: Path) -> None:
    plain = prepared(*DIGITS, out="plain")
    turned = prepared(*DIGITS, "--feature-shift", "rotation", "--angles", "0,90,-90,180", out="turned")
    angles = turned.extras["feature_shift"]
    assert sorted(angles) == [-90] * 3 + [0] * 3 + [90] * 3 + [180] * 3 and angles.tolist() != [0, 90, -90, 180] * 3
    for (client, x, val, y, _), (_, was, was_val, was_y, _) in zip(every_row(turned), every_row(plain), strict=True):
        quarters = int(angles[client]) // 90 % 4
        np.testing.assert_array_equal(x, np.rot90(was, quarters, axes=(2, 3)))
        np.testing.assert_array_equal(val, np.rot90(was_val, quarters, axes=(2, 3)))
        np.testing.assert_array_equal(y, was_y)
    np.testing.assert_array_equal(turned.test()[0], plain.test()[0])
    assert any("the test part is not" in note for note in turned.manifest.notes)


def test_an_angle_between_quarter_turns_is_interpolated(place: Path) -> None:
    """An upright bar through the middle of an image is on a diagonal after half a quarter turn."""
    image = np.zeros((10, 9, 9), np.float32)
    image[:, :, 4] = 1.0
    np.savez("bars.npz", x=image, y=np.arange(10) % 2, x_test=image, y_test=np.arange(10) % 2)
    words = ["arrays", "--raw", "bars.npz", "--partition", "iid", "--clients", "2", "--feature-shift", "rotation"]
    x = np.asarray(prepared(*words, "--angles", "45").client(0)[0])[0, 0]
    slope = [x[4 - step, 4 - step] for step in (-2, -1, 0, 1, 2)]  # counter-clockwise: to the upper left
    assert min(slope) > 0.9 and max(x[4 - step, 4 + step] for step in (-2, 2)) < 0.1


def test_noise_grows_with_the_client_and_every_row_has_its_own(place: Path) -> None:
    """Client k of 5 gets 0.5 (k + 1) / 5: variances of 20,000 values within five standard errors, 5 sqrt(2 / n)."""
    x = np.random.default_rng(0).normal(3.0, 2.0, (2500, 50)).astype(np.float32)
    np.savez("rows.npz", x=x, y=np.arange(2500) % 3)
    words = ["arrays", "--raw", "rows.npz", "--partition", "iid", "--clients", "5"]
    plain = prepared(*words, out="plain")
    noisy = prepared(*words, "--feature-shift", "noise", "--level", "0.5", "--shards", "3", out="noisy")
    again = prepared(*words, "--feature-shift", "noise", "--level", "0.25", "--scale", "variance", out="again")
    np.testing.assert_allclose(again.extras["feature_shift"] ** 2, [0.05, 0.1, 0.15, 0.2, 0.25])
    same = prepared(*words, "--feature-shift", "noise", "--level", "0.5", "--shards", "1", out="same")
    for one, other in zip(all_clients(noisy), all_clients(same), strict=True):  # whatever rows are read together
        np.testing.assert_array_equal(one[1], other[1])
    np.testing.assert_allclose(noisy.extras["feature_shift"], [0.1, 0.2, 0.3, 0.4, 0.5])
    for client in range(5):
        added = np.asarray(noisy.client(client)[0], np.float64) - plain.client(client)[0]
        level = (client + 1) / 10
        assert added.size == 20_000 and abs(added.var() / level**2 - 1) < Z * np.sqrt(2 / added.size)
        assert abs(added.mean()) < Z * level / np.sqrt(added.size)
        between = np.corrcoef(added)[np.triu_indices(len(added), 1)]
        assert abs(between.mean()) < Z / np.sqrt(50 * len(between))
    whole = np.concatenate([noisy.client(client)[0] for client in range(5)]).std(0)
    assert noisy.description.std == pytest.approx(whole, rel=1e-5)  # measured with the noise


BLOCKS = ["arrays", "--raw", "rows.npz", "--partition", "iid", "--clients", "40", "--val", "0.2"]


def rows_of_ten_classes() -> None:
    """Row r has the feature r, so that it is known again, and the label r mod 10."""
    rows = np.arange(20_000)
    np.savez("rows.npz", x=rows[:, None].astype(np.float32), y=rows % 10)


@pytest.mark.parametrize("name", ["uniform", "pair"])
def test_noisy_clients_have_wrong_labels_at_their_rate(place: Path, name: str) -> None:
    """40 clients of 320 training rows: a label becomes any class (9/10 of them others), or the next; z = 5 each.

    Half of the clients are noisy: 20 expected, with a standard deviation of 3.2. Rates are uniform between 0.3 and 0.7:
    the mean of some twenty is within 0.5 +- 0.13, z = 5.
    """
    rows_of_ten_classes()
    words = ["--label-noise", name, "--noisy", "0.5", "--low", "0.3", "--high", "0.7"]
    store = prepared(*BLOCKS, *words)
    rates = store.extras["label_noise"]
    noisy = rates > 0
    assert 5 <= noisy.sum() <= 35 and ((rates[noisy] >= 0.3) & (rates[noisy] <= 0.7)).all()
    assert abs(rates[noisy].mean() - 0.5) < Z * 0.4 / np.sqrt(12 * noisy.sum())
    wrong = 0
    for client, x, val, y, val_y in every_row(store):
        true = np.rint(x[:, 0]).astype(int) % 10
        changed = y != true
        wrong += int(changed.sum())
        chance = rates[client] * (0.9 if name == "uniform" else 1.0)
        assert abs(changed.mean() - chance) < Z * np.sqrt(chance * (1 - chance) / len(y)) + 1e-12
        if name == "pair":
            np.testing.assert_array_equal(y[changed], (true[changed] + 1) % 10)
        np.testing.assert_array_equal(val_y, np.rint(val[:, 0]).astype(int) % 10)
        np.testing.assert_array_equal(np.bincount(y, minlength=10), store.class_counts(np.array([client]))[0])
    assert store.samples == 12_800 and store.part_samples("val") == 3200
    assert f"{wrong:,} of 12,800 training labels are not the true ones" in store.manifest.notes
    x, y = store.test()
    np.testing.assert_array_equal(y, np.rint(np.asarray(x)[:, 0]).astype(int) % 10)


OWN = """
import numpy as np

def dimmed(clients, generator, *, by: float = 0.5):
    "Client k sees its images darker."
    def dim(x, client, generator):
        return x * by ** client
    return dim

def flipped(labels, owners, classes, generator, *, of: int = 0):
    "One client has all labels mirrored."
    return np.where(owners == of, classes - 1 - labels, labels)

def cut(clients, generator):
    return lambda x, client, generator: x[0, 0]

def none(clients, generator):
    return None

def beyond(labels, owners, classes, generator):
    return labels + 1

def unrated(labels, owners, classes, generator):
    return labels, 0.5

def crowded(labels, owners, classes, generator):
    return labels, np.zeros(99)
"""


def test_custom_shifts_and_label_noise_are_functions(place: Path) -> None:
    Path("changes_of_mine.py").write_text(OWN)
    plain = prepared(*DIGITS, out="plain")
    words = ["--feature-shift", "changes_of_mine:dimmed", "--by", "0.9"]
    words += ["--label-noise", "changes_of_mine:flipped", "--of", "3"]
    own = prepared(*DIGITS, *words, out="own")
    for (client, x, _, y, val_y), (_, was, _, was_y, was_val_y) in zip(every_row(own), every_row(plain), strict=True):
        np.testing.assert_array_equal(x, np.rint(was * 0.9**client))
        np.testing.assert_array_equal(y, 9 - was_y.astype(int) if client == 3 else was_y)
        np.testing.assert_array_equal(val_y, was_val_y)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--feature-shift", "changes_of_mine:cut"], r"feature shift .*:cut .* of shape|returned uint8"),
        (["--feature-shift", "changes_of_mine:none"], "returned a NoneType"),
        (["--label-noise", "changes_of_mine:beyond"], "returned labels from 1 to 10"),
        (["--label-noise", "changes_of_mine:unrated"], r"returned float64 \(\) beside the labels: return the rate"),
        (["--label-noise", "changes_of_mine:crowded"], r"returned float64 \(99,\) beside the labels"),
    ],
)
def test_a_useless_answer_names_the_component(place: Path, words: list[str], message: str) -> None:
    Path("changes_of_mine.py").write_text(OWN)
    with pytest.raises(ComponentFailure, match=message):
        main([*DIGITS, *words, "--out", "shards"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--feature-shift", "rotations"], "did you mean 'rotation'?"),
        (["--feature-shift", "rotation", "--angles", "0;90"], "give degrees with commas"),
        (["--feature-shift", "rotation", "--angles", "inf"], "finite degrees"),
        (["--feature-shift", "rotation", "--level", "1"], "--level is an option of noise"),
        (["--feature-shift", "noise", "--level", "x"], "--level = 'x' does not suit noise"),
        (["--feature-shift", "noise", "--level", "0"], "above 0"),
        (["--feature-shift", "noise", "--scale", "range"], "--scale"),
        (["--label-noise", "pairs"], "did you mean 'pair'?"),
        (["--label-noise", "pair", "--high", "1.5"], "shares from 0 to 1"),
        (["--label-noise", "pair", "--low", "0.9", "--high", "0.1"], "low at most high"),
        (["--angles", "90"], "--angles is an option of rotation"),
        ([*TEXTS, "--feature-shift", "noise"], "is text: leave it out"),
        ([*VECTORS, "--feature-shift", "rotation"], "turns images"),
    ],
)
def test_what_no_shift_and_no_label_noise_means_is_rejected(
    place: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("rows.npz", x=np.ones((9, 4), np.int32), y=np.arange(9) % 3)
    words = words if words[0] == "arrays" else [*DIGITS, *words]
    assert main([*words, "--out", "shards"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_attribute_of_a_row_is_what_its_features_say(place: Path) -> None:
    """Sorted by brightness, clients of the digits do not overlap in the mean of their images."""
    words = ["digits", "--partition", "attribute", "--attribute", "mean", "--clients", "6"]
    store = prepared(*words)
    means = [np.asarray(x, np.float64).mean(axis=(1, 2, 3)) for _, x, *_ in all_clients(store)]
    ordered = sorted(means, key=min)
    assert all(one.max() <= other.min() for one, other in zip(ordered, ordered[1:], strict=False))
    assert main([*words[:4], "color", *words[5:], "--out", "other"]) == 2


def test_a_column_of_a_table_is_an_attribute(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("age,size,label\n" + "".join(f"{row * 37 % 101},{row},{row % 3}\n" for row in range(100)))
    words = ["arrays", "--raw", "t.csv", "--partition", "attribute", "--clients", "4", "--out", "shards", "--attribute"]
    assert main([*words, "age"]) == 0
    ages = sorted((sorted(x[:, 0].tolist()) for _, x, _ in all_clients(open_store("shards"))), key=min)
    assert all(one[-1] < other[0] for one, other in zip(ages, ages[1:], strict=False))
    assert main([*words, "ages", "--overwrite"]) == 2 and "did you mean age?" in capsys.readouterr().err


def all_clients(store: ShardStore) -> list[tuple[int, np.ndarray, np.ndarray]]:
    return [(client, *map(np.asarray, store.client(client))) for client in range(store.clients)]
