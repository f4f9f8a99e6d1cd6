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
from fedmpi.data.arrays import arrays_of
from fedmpi.data.opening import open_store
from fedmpi.data.schema import Manifest
from fedmpi.data.shards import ShardStore
from tests.data.validation import validation_of
from tests.data_prep.command import main
from tests.end_to_end.runs import TIMINGS

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
    with pytest.raises(UserError, match="classes = 6"):
        made(val=val, classes=6)
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
    ("y has 59 entries where x has 60", {"y": Y[:-1]}),
    ("y holds the label -1", {"y": Y - 1}),
    ("y holds the label", {"y": Y + 10**12}),
    ("owner holds -1", {"owner": OWNER - 1}),
    ("owner holds 1", {"owner": OWNER + 10**12}),
    ("owner holds object", {"owner": np.array([None, *OWNER[1:]])}),
    ("a sample of client 5", {"clients": 3}),
    ("leave clients out", {"owner": OWNER.astype(str), "clients": 7}),
    ("class counts", {"clients": 10**6, "classes": 10**6}),
    ("a label 3", {"classes": 2}),
    ('task = "text"', {"x": X.astype(np.int64)}),
    ("a row of them for each sample", {"x": X[:, 0, 0, 0]}),
    ("not finite", {"x": np.full((60, 2), np.nan)}),
    ("where those of x are", {"test": (X[:10, 0], Y[:10])}),
    ("test holds no sample", {"test": (X[:0], Y[:0])}),
    ("x holds no sample", {"x": X[:0], "y": Y[:0], "owner": OWNER[:0]}),
    ("std above 0", {"std": 0}),
    ("std above 0", {"mean": float("nan")}),
    ("one for each of 3 channels", {"mean": [1, 2]}),
    ("'sound' is unknown", {"task": "sound"}),
    ("a list given", {"x": [[1, 2], [3]]}),
    ("a Tensor given", {"x": torch.zeros(60, 4).to_sparse()}),
    ("'q', who owns none", {"owner": OWNER.astype(str), "val": (X[:1], Y[:1], ["q"])}),
    ("features and labels", {"val": (X[:3],)}),
    ("val's y has 2 entries", {"val": (X[:3], Y[:2])}),
    ("'ranks' is unknown", {"targets": "ranks"}),
    ("or other numbers", {"y": np.array(list("abcdef") * 10)}),
    ("holds the token -2", {"y": np.full((60, 2), -2)}),
    ("whole numbers", {"y": np.full((60, 2), 0.5), "targets": "tokens"}),
    ("a row of values", {"y": Y, "targets": "tokens"}),
    ("neither 0 nor 1", {"y": np.full((60, 2), 2.0), "targets": "multilabel"}),
    ("not finite", {"y": np.full(60, np.inf)}),
    ("no target", {"y": np.zeros((60, 0))}),
    ("whole numbers, the classes", {"y": Y.astype(float), "targets": "classification"}),
    ("leave classes out", {"y": np.zeros((60, 2)), "test": (X[:9], np.zeros((9, 2))), "classes": 3}),
]


@pytest.mark.parametrize(("words", "wrong"), WRONG, ids=[words for words, _ in WRONG])
def test_arrays_that_do_not_match_are_rejected(words: str, wrong: dict[str, Any]):
    with pytest.raises(UserError, match=rf"^ClientArrays: .*{re.escape(words)}"):
        made(**wrong)


@pytest.mark.parametrize(
    ("y", "targets", "classes"),
    [
        (np.arange(6), "classification", 6),
        (np.arange(12).reshape(6, 2), "tokens", 12),
        (np.ones((6, 4), bool), "multilabel", 4),
        (np.zeros(6), "regression", 1),
        (np.zeros((6, 2, 3)), "regression", 6),
    ],
)
def test_arrays_show_by_their_type_and_shape_what_they_are(y: np.ndarray, targets: str, classes: int):
    x = np.zeros((6, 2), np.float32)
    arrays = ClientArrays(x, y, np.zeros(6, int), test=(x, y))
    assert (arrays.description.targets, arrays.description.classes) == (targets, classes)
    assert arrays.description.target_shape == y.shape[1:]
    np.testing.assert_array_equal(arrays.store.client(0)[1], y)


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


def test_only_folders_of_shards_are_overwritten_and_only_when_asked(tmp_path: Path):
    made().save(tmp_path / "shards")
    with pytest.raises(UserError, match="overwrite"):
        made().save(tmp_path / "shards")
    assert made().save(tmp_path / "shards", shards=1, overwrite=True) == tmp_path / "shards"
    assert len(open_store(tmp_path / "shards").shard_starts) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(UserError, match="holds something else"):
        made().save(tmp_path / "mine")
    with pytest.raises(UserError, match="shards = 0"):
        made().save(tmp_path / "new", shards=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as a folder of shards, written by data_prep."""
    where = tmp_path_factory.mktemp("same")
    np.savez(where / "mine.npz", x=X, y=Y, user=OWNER, x_test=TEST[0], y_test=TEST[1])
    words = ["arrays", "--raw", str(where / "mine.npz"), "--channels", "first", "--partition", "user"]
    assert main([*words, "--out", str(where / "shards")]) == 0
    return where / "shards"


def test_a_run_on_arrays_is_bit_identical_to_that_on_the_same_data_as_shards(folder: Path):
    shards = open_store(folder)
    x, y = shards.rows(np.arange(shards.samples))
    owner = np.repeat(np.arange(shards.clients), shards.sizes)
    measured = ClientArrays(x, y, owner, test=shards.test()).description
    assert np.allclose([measured.mean, measured.std], [shards.description.mean, shards.description.std], rtol=1e-12)
    mean, std = shards.description.mean, shards.description.std
    arrays = ClientArrays(x, y, owner, test=shards.test(), mean=mean, std=std)
    assert arrays.description == shards.description
    keys = {"rounds": 2, "clients.count": 3, "local.engine": "sequential", "cluster.threads": 1}
    on_shards, on_arrays = (fedmpi.run("fedavg", keys, data=data) for data in (folder, arrays))
    for one, other in zip(on_shards.records, on_arrays.records, strict=True):
        assert {k: v for k, v in one.items() if k not in TIMINGS} == {
            k: v for k, v in other.items() if k not in TIMINGS
        }
    for one, other in zip(on_shards.model.parameters(), on_arrays.model.parameters(), strict=True):
        assert torch.equal(one, other)


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
    with pytest.raises(UserError, match="gave int: it must return fedmpi.ClientArrays"):
        open_store("three_clients:wrong")
    with pytest.raises(UserError, match="has no function or class 'thre'"):
        open_store("three_clients:thre")
    with pytest.raises(UserError, match="were arrays in the memory of the program that ran"):
        open_store(made().config_name)


class NotMine(UserError):
    """Error that the author of a source distinguishes from others."""


def test_a_source_of_data_rejects_in_its_words():
    def refusing():
        raise NotMine("the scanner is switched off. Switch it on")

    def different():
        return ClientArrays(np.ones((4, 2), np.float32), [0, 1, 0], [0, 0, 1, 1], test=TEST)

    with pytest.raises(NotMine, match="^the scanner is switched off. Switch it on$"):
        arrays_of(refusing, {})
    with pytest.raises(UserError, match=r"^data.source = 'tests.*different': ClientArrays: y has 3 entries"):
        arrays_of(different, {})
