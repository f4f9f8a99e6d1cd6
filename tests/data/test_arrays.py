"""Samples in memory as the clients of a run: ClientArrays and the same data as shards, and rejected arrays."""

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
    assert tensors.digest == made().digest != made(y=Y[::-1].copy()).digest


@pytest.mark.parametrize(
    "more",
    [
        {"test": (X[10:20], Y[:10])},
        {"test": (X[:10], Y[10:20])},
        {"val": (X[1:4], Y[:3])},
        {"val": (X[:3], Y[1:4])},
    ],
    ids=["test-x", "test-y", "val-x", "val-y"],
)
def test_data_with_other_held_out_samples_are_other_data(more: dict[str, Any]):
    held_out = {"val": (X[:3], Y[:3])}
    assert made(**(held_out | more)).digest != made(**held_out).digest != made().digest


def test_a_label_that_only_held_out_samples_have_is_a_class():
    val = X[:3], np.array([0, 6, 1])
    assert made(val=val).description.classes == 7
    with pytest.raises(UserError, match="classes = 6, but there is a label 6"):
        made(val=val, classes=6)


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


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"y": Y[:-1]}, "y has 59 entries where x has 60"),
        ({"y": Y - 1}, "y holds the label -1"),
        ({"y": Y.astype(float), "targets": "classification"}, "y is float64 (60,); it must be (n,) whole numbers"),
        ({"owner": OWNER - 1}, "owner holds -1"),
        ({"clients": 3}, "there are 3 clients, but a sample of client 5"),
        ({"classes": 2}, "classes = 2, but there is a label 3"),
        ({"x": X.astype(np.int64)}, 'x holds int64 numbers: say task = "text"'),
        ({"x": X[:, 0, 0, 0]}, "x is uint8 (60,); it must hold numbers, a row of them for each sample"),
        ({"x": np.full((60, 2), np.nan)}, "x holds numbers that are not finite"),
        ({"test": (X[:10, 0], Y[:10])}, "test's x has samples uint8 (4, 4) where those of x are uint8 (3, 4, 4)"),
        ({"test": (X[:0], Y[:0])}, "test holds no sample"),
        ({"std": 0}, "std must be above 0"),
        ({"mean": [1, 2]}, "mean has 2 values for 3 channels"),
        ({"task": "sound"}, "task = 'sound' is unknown"),
        ({"x": X[:0], "y": Y[:0], "owner": OWNER[:0]}, "x holds no sample"),
        ({"x": [[1, 2], [3]]}, "no array can be made of a list given"),
        ({"x": np.ma.masked_less(np.zeros((60, 4)), 1)}, "an array has masked values"),
        ({"owner": np.array([None, *OWNER[1:]])}, "owner holds None: give whole numbers from 0 on, or names"),
        ({"owner": OWNER + 10**12}, "clients are numbered from 0 on without gaps, or have names"),
        ({"y": Y + 10**12}, "classes are numbered from 0 on without gaps"),
        ({"clients": 10**6, "classes": 10**6}, "1000000 clients times 1000000 classes"),
        ({"owner": OWNER.astype(str), "val": (X[:1], Y[:1], ["q"])}, "val has samples of 'q', who owns none of x"),
        ({"owner": OWNER.astype(str), "clients": 7}, "clients = 7, but owner names 6: leave clients out"),
        ({"classes": "ten"}, "classes = 'ten' must be a whole number above 0"),
        ({"x": X[:, :, :0]}, "x is uint8 (60, 3, 0, 4): a sample holds no value"),
        ({"x": torch.zeros(60, 4).to_sparse()}, "no array can be made of a Tensor given"),
        ({"val": (X[:3],)}, "val must be features and labels"),
        ({"val": (X[:3], Y[:2])}, "val's y has 2 entries where val's x has 3"),
        ({"mean": float("nan")}, "std must be above 0 and mean finite"),
    ],
)
def test_arrays_that_do_not_match_are_rejected(wrong: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=re.escape(sentence)):
        made(**wrong)


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
        raise NotMine("the scanner is switched off: switch it on")

    def different():
        return ClientArrays(np.ones((4, 2), np.float32), [0, 1, 0], [0, 0, 1, 1], test=TEST)

    with pytest.raises(NotMine, match="^the scanner is switched off: switch it on$"):
        arrays_of(refusing, {})
    with pytest.raises(UserError, match=r"^data.source = 'tests.*different': ClientArrays: y has 3 entries"):
        arrays_of(different, {})
