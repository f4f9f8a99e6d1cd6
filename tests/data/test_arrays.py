"""Samples in memory as the clients of a run: ClientArrays, the same data as shards, and rejected arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import ClientArrays, UserError
from fedmpi.data.opening import open_store
from fedmpi.data.schema import Manifest
from fedmpi.data.shards import ShardStore
from tests.data.conftest import validation_of

RNG = np.random.default_rng(3)
X = RNG.integers(0, 256, (60, 3, 4, 4), np.uint8)
Y = RNG.integers(0, 4, 60)
OWNER = RNG.integers(0, 6, 60)
TEST = X[:10], Y[:10]


def made(**more: Any) -> ClientArrays:
    return ClientArrays(**({"x": X, "y": Y, "owner": OWNER, "test": TEST} | more))


def test_every_client_has_its_samples_in_the_order_given():
    store = made().store
    assert store.clients == 6 and store.sizes.tolist() == np.bincount(OWNER, minlength=6).tolist()
    for client in range(6):
        x, y = store.client(client)
        assert np.array_equal(x, X[client == OWNER]) and np.array_equal(y, Y[client == OWNER])
        assert (
            store.class_counts(np.array([client]))[0].tolist() == np.bincount(Y[client == OWNER], minlength=4).tolist()
        )
    x, y = store.test()
    assert np.array_equal(x, TEST[0]) and np.array_equal(y, TEST[1]) and store.validation() is None
    with pytest.raises(ValueError, match="read-only"):
        store.client(0)[0][...] = 0


def test_clients_may_have_names():
    names = np.array([f"writer{k}" for k in range(6)])
    arrays = made(owner=names[OWNER], val=(X[:3], Y[:3], names[[5, 0, 5]]))
    assert arrays.store.client_ids.tolist() == names.tolist()
    assert np.array_equal(arrays.store.client(4)[0], X[OWNER == 4])
    assert np.array_equal(validation_of(arrays.store, 5)[1], Y[[0, 2]])


def test_tensors_lists_and_arrays_say_the_same():
    tensors = ClientArrays(torch.tensor(X), torch.tensor(Y), OWNER.tolist(), test=[torch.tensor(part) for part in TEST])
    assert tensors.digest == made().digest


def test_data_with_other_samples_are_other_data():
    held_out = {"val": (X[:3], Y[:3])}
    changes = ({"test": (X[10:20], Y[:10])}, {"test": (X[:10], Y[10:20])}, {"val": (X[1:4], Y[:3])})
    changes += ({"val": (X[:3], Y[1:4])}, {"y": Y[::-1].copy()}, {"val": None}, {})
    assert len({made(**(held_out | more)).digest for more in changes}) == len(changes)


def test_a_label_that_only_held_out_samples_have_is_a_class():
    val = X[:3], np.array([0, 6, 1])
    assert made(val=val).description.classes == 7
    assert "in the validation part only, with their samples: 6 (1)" in made(val=val).store.manifest.notes[0]
    assert made(y=np.zeros(60, int), test=(X[:3], np.zeros(3, int))).description.classes == 2, "one has no choice"


def test_bytes_are_standardized_by_what_is_measured_and_floats_stay_as_given():
    scaled = X / 255.0
    description = made().description
    assert np.allclose(description.mean, scaled.mean((0, 2, 3))) and np.allclose(description.std, scaled.std((0, 2, 3)))
    assert description.task == "image" and description.feature_shape == (3, 4, 4) and description.classes == 4
    floats = made(x=scaled, test=(scaled[:10], Y[:10]))
    assert floats.description.dtype == "float32" and floats.description.mean == ()
    assert made(mean=0.5, std=[1, 2, 3]).description.std == (1.0, 2.0, 3.0)
    flat = scaled.reshape(60, -1)
    assert made(x=flat, test=(flat[:10], Y[:10])).description.task == "vector"


def test_text_is_token_ids():
    tokens = RNG.integers(0, 30, (60, 7))
    arrays = made(x=tokens, test=(tokens[:5], Y[:5]), task="text", classes=9)
    assert arrays.description.dtype == "int32" and arrays.description.classes == 9
    assert arrays.description.vocabulary == tokens.max() + 1
    rare = made(x=tokens, test=(tokens[:5], Y[:5]), val=(tokens[:5] + 40, Y[:5]), task="text")
    assert rare.description.vocabulary == tokens[:5].max() + 41
    for given, expected in ((99, 99), (5, tokens.max() + 1)):
        again = made(x=tokens, test=(tokens[:5], Y[:5]), task="text", vocabulary=given)
        assert again.description.vocabulary == expected
        after = made(x=tokens, y=tokens, test=(tokens[:5],) * 2, task="text", vocabulary=given)
        assert after.description.classes == expected


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("y has 59", {"y": Y[:-1]}),
    ("-1, none of the 4 classes", {"y": np.where(Y > 0, Y, -1)}),
    ("Subtract 1 from all labels", {"y": Y + 1, "test": (X[:10], Y[:10] + 1)}),
    ("Subtract 1,", {"owner": OWNER + 1}),
    ("owner holds -1", {"owner": OWNER - 1}),
    ("owner holds 1", {"owner": OWNER + 10**12}),
    ("owner is int64 (59,)", {"owner": OWNER[1:]}),
    ("clients = 5", {"clients": 5}),
    ("none of the 2 classes", {"classes": 2}),
    ('task = "text"', {"x": X.astype(np.int64)}),
    ("np.moveaxis(x, 3, 1)", {"x": np.zeros((60, 9, 9, 3))}),
    ("without gaps", {"y": Y + 10**12 * (Y > 0)}),
    ("not finite", {"x": np.full((60, 2), np.nan)}),
    ("that of x is", {"test": (X[:10, 0], Y[:10])}),
    ("x holds no value", {"x": X[:0], "y": Y[:0], "owner": OWNER[:0]}),
    ("task", {"task": "sound"}),
    ("a list", {"x": [[[1], [2, 3]], [[4], [5]]]}),
    ("'q', who owns none", {"owner": OWNER.astype(str), "val": (X[:1], Y[:1], ["q"])}),
    ("val's owner holds 6", {"val": (X[:1], Y[:1], [6])}),
    ("features and labels", {"val": (X[:3],)}),
    ("test must be features and labels", {"test": None}),
    ("'ranks' is unknown", {"targets": "ranks"}),
    ("y.argmax(1)", {"y": np.eye(4)[Y]}),
    ("-2, none", {"y": np.full((60, 2), -2), "test": (X[:9], np.full((9, 2), -2))}),
    ("tokens needs", {"y": Y, "targets": "tokens"}),
    ("not in 0 to 1", {"y": np.full((60, 2), 2.0), "targets": "multilabel", "test": (X[:9], np.zeros((9, 2)))}),
    ("single precision", {"y": np.full(60, np.inf), "test": (X[:9], np.zeros(9))}),
    ("classification needs", {"y": Y.astype(float), "targets": "classification"}),
]


@pytest.mark.parametrize(("words", "wrong"), WRONG)
def test_arrays_that_do_not_match_are_rejected(words: str, wrong: dict[str, Any]):
    with pytest.raises(UserError, match=rf"^ClientArrays: .*{re.escape(words)}"):
        made(**wrong)


@pytest.mark.parametrize(
    ("y", "targets", "shape", "classes"),
    [
        (np.arange(6), "classification", (), 6),
        (np.arange(6)[:, None], "classification", (), 6),
        (np.arange(12).reshape(6, 2), "tokens", (2,), 12),
        (np.ones((6, 4), bool), "multilabel", (4,), 4),
        (np.zeros(6), "regression", (), 1),
        (np.zeros((6, 1)), "regression", (), 1),
        (np.zeros((6, 2, 3)), "regression", (2, 3), 6),
    ],
)
def test_arrays_show_by_their_type_and_shape_what_they_are(
    y: np.ndarray, targets: str, shape: tuple[int, ...], classes: int
):
    x = np.zeros((6, 2), np.float32)
    arrays = ClientArrays(x, y, np.zeros(6, int), test=(x, y))
    found = arrays.description
    assert (found.targets, found.target_shape, found.classes) == (targets, shape, classes)
    np.testing.assert_array_equal(arrays.store.client(0)[1], y.reshape(6, *shape))


def test_numbers_of_clients_and_classes_may_exceed_those_with_samples():
    more = made(owner=OWNER + 1, clients=9, y=Y + 1, classes=8, test=(X[:10], Y[:10] + 1))
    assert (more.store.clients, more.description.classes, more.store.manifest.empty_clients) == (9, 8, 3)
    last = np.zeros((60, 9, 9, 3))
    assert made(x=last, task="image", test=(last, Y)).description.feature_shape == (9, 9, 3)


def test_samples_that_torch_ignores_are_left_out():
    kept, names = Y != 2, np.array([f"c{owner}" for owner in OWNER])
    y = np.where(kept, Y, -100)
    for owner in (OWNER, names):
        of = owner[10:40]
        whole = made(y=y, owner=owner, test=(X[:10], y[:10]), val=(X[10:40], y[10:40], of), classes=4)
        x, held = X[kept], kept[10:40]
        test, val = (X[:10][kept[:10]], Y[:10][kept[:10]]), (X[10:40][held], Y[10:40][held], of[held])
        assert whole.digest == made(x=x, y=Y[kept], owner=owner[kept], test=test, val=val, classes=4).digest
        assert whole.store.sizes.sum() == kept.sum()
    assert np.array_equal(made(val=(X, y)).val[1], Y[kept])
    with pytest.raises(UserError, match="test's y is -100 for all samples"):
        made(test=(X, np.full(60, -100)))


def every_kind() -> dict[str, ClientArrays]:
    """Data of every kind of features, targets and held-out parts."""
    vectors, tokens = RNG.normal(size=(60, 4)), RNG.integers(0, 11, (60, 6))
    after = np.where(RNG.random((60, 6)) < 0.3, -1, RNG.integers(0, 11, (60, 6)))
    several, numbers = RNG.random((60, 3)) < 0.4, RNG.normal(size=(60, 2))
    names = np.array([f"c{owner}" for owner in OWNER])
    return {
        "images": made(owner=names),
        "held out by client": made(owner=names, val=(X[:30], Y[:30], np.repeat(["c0", "c2"], 15))),
        "held out": made(val=(X[:30], Y[:30])),
        "empty clients": ClientArrays(vectors, Y, OWNER, clients=9, test=(vectors, Y), mean=2.0, std=0.5),
        "tokens": ClientArrays(tokens, after, OWNER, test=(tokens, after), task="text", vocabulary=13),
        "labels": ClientArrays(vectors, several, OWNER, test=(vectors, several)),
        "numbers": ClientArrays(vectors, numbers, OWNER, test=(vectors, numbers)),
    }


def test_saved_arrays_are_read_as_they_are_in_memory(tmp_path: Path):
    for kind, arrays in every_kind().items():
        memory, disk = arrays.store, open_store(arrays.save(tmp_path / kind, shards=3), verify=True)
        assert disk.description == memory.description and disk.name == memory.name and disk.manifest.dropped == 0
        everything = np.arange(memory.samples)
        pairs = [(disk.client_ids, memory.client_ids), (disk.sizes, memory.sizes)]
        pairs += [*zip(disk.rows(everything), memory.rows(everything), strict=True)]
        pairs += [*zip(disk.test(), memory.test(), strict=True)]
        assert (disk.validation() is None) == (memory.validation() is None)
        pairs += [*zip(disk.validation() or (), memory.validation() or (), strict=True)]
        if arrays.val_offsets is not None:
            pairs.append((disk.validation_offsets, memory.validation_offsets))
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours, theirs, err_msg=kind)


def test_a_folder_is_overwritten_only_when_asked(tmp_path: Path):
    made().save(tmp_path / "shards")
    with pytest.raises(UserError, match="overwrite"):
        made().save(tmp_path / "shards")
    assert made().save(tmp_path / "shards", shards=1, overwrite=True) == tmp_path / "shards"
    assert len(open_store(tmp_path / "shards").shard_starts) == 2
    with pytest.raises(UserError, match="shards = 0"):
        made().save(tmp_path / "new", shards=0)


SOURCE = """
import numpy as np
import fedmpi

def three(*, clients: int = 3) -> fedmpi.ClientArrays:
    x = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    return fedmpi.ClientArrays(x, y, np.arange(60) % clients, test=(x, y))

def wrong():
    return 7
"""


def test_a_custom_function_is_a_source_of_data_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "three_clients.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    store = open_store("three_clients:three")
    assert isinstance(store, ShardStore) and isinstance(store.manifest, Manifest) and store.clients == 3
    assert open_store("three_clients:three", {"clients": 5}).clients == 5
    run = fedmpi.run("fedavg", {"rounds": 1, "clients.count": 2}, data="three_clients:three")
    assert run.records[0]["participants"] == 2
    for name, words in (
        ("three_clients:wrong", "gave int"),
        ("three_clients:thre", "no function or class 'thre'"),
        (made().config_name, "Give them again"),
    ):
        with pytest.raises(UserError, match=words):
            open_store(name)


def test_class_names_are_saved_and_shown(tmp_path: Path) -> None:
    names = ("cat", "dog", "owl")
    x, y = np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32), np.arange(60) % 3
    arrays = ClientArrays(x, y, np.arange(60) % 5, test=(x, y), class_names=names)
    assert open_store(arrays.save(tmp_path / "s")).manifest.class_names == names
    more = ClientArrays(x, y + 1, np.arange(60) % 5, test=(x, y + 1), class_names=("bat", *names, "rat"))
    assert more.description.classes == 5
    fedmpi.run("fedavg", {"rounds": 1, "clients.count": 2}, data=arrays, out=tmp_path / "RUN")
    assert (tmp_path / "RUN" / "confusion.csv").read_text().splitlines()[0].split(",")[1:] == list(names)
    several = ClientArrays(
        x, np.eye(3, dtype=bool)[y], np.arange(60) % 5, test=(x, np.eye(3, dtype=bool)[y]), class_names=names
    )
    assert several.store.manifest.class_names == names
    for wrong, said in (
        ({"class_names": names[:2]}, "class_names has 2 names, but there are 3 classes"),
        ({"class_names": names, "targets": "regression"}, "no effect"),
    ):
        with pytest.raises(UserError, match=said):
            ClientArrays(x, y, np.arange(60) % 5, test=(x, y), **wrong)
