"""The embedded digits: a fixed split, a fixed default partition, options with clear errors."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedmpi
from fedmpi import UserError
from fedmpi.common.registry import describe
from fedmpi.config import build_config, config_table, config_toml, load_config
from fedmpi.config.choices import data_options
from fedmpi.data.embedded import load_digits_split
from fedmpi.data.opening import open_store
from fedmpi.describe.parts import list_parts, show_part


def test_every_fifth_image_of_a_class_is_for_testing() -> None:
    x, y, test_x, test_y = load_digits_split()
    assert len(x) + len(test_x) == 1797 and x.shape[1:] == (1, 8, 8) and x.max() == 16
    np.testing.assert_array_equal(np.bincount(test_y), (np.bincount(y) + np.bincount(test_y)) // 5)


def test_pixels_and_labels_are_those_that_scikit_learn_loads() -> None:
    x, y, test_x, test_y = load_digits_split()
    images, labels = load_digits(return_X_y=True)
    ours = np.concatenate([x, test_x]).reshape(-1, 64), np.concatenate([y, test_y])
    assert sorted(zip(map(bytes, ours[0]), ours[1], strict=True)) == sorted(
        zip(map(bytes, images.astype(np.uint8)), labels, strict=True)
    )


def test_a_run_that_needs_no_strata_waits_neither_for_scikit_learn_nor_for_torchs_compiler() -> None:
    code = "import sys, fedmpi; fedmpi.run('fedavg', {'rounds': 1}); print([name for name in "
    code += "('sklearn', 'scipy.stats', 'matplotlib', 'torch._dynamo') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_default_is_twenty_mildly_heterogeneous_clients_always_the_same() -> None:
    first, second = open_store("digits"), open_store("digits")
    assert first.clients == 20 and first.samples == 1442 and first.sizes.min() > 0 and np.ptp(first.sizes) > 0
    np.testing.assert_array_equal(first.rows(np.arange(1442))[0], second.rows(np.arange(1442))[0])


def test_every_training_image_is_in_exactly_one_client() -> None:
    x, _, _, _ = load_digits_split()
    held = open_store("digits").rows(np.arange(1442))[0]
    assert sorted(map(bytes, held.reshape(1442, -1))) == sorted(map(bytes, x.reshape(1442, -1)))


def test_options_are_read_from_the_name_and_the_mapping() -> None:
    store = open_store("digits:clients=7, partition=iid", {"seed": 3})
    assert store.clients == 7 and np.ptp(store.sizes) <= 1 and store.manifest.partition == "iid"
    assert store.manifest.seed == 3


def test_options_stand_beside_the_name_as_those_of_every_part() -> None:
    config = load_config(None, ["preset=fedavg", "data.shards=digits:partition=iid", "data.clients=7", "data.seed=3"])
    store = open_store(config.data.shards, data_options(config))
    assert (store.clients, store.manifest.partition, store.manifest.seed) == (7, "iid", 3)
    again = build_config([("config.toml", tomllib.loads(config_toml(config)))])
    assert data_options(again) == {"clients": 7, "seed": 3}
    assert config_table(load_config(None, ["preset=fedavg"]))["data"] == {
        "shards": "digits",
        "verify": False,
        "normalise": True,
    }
    run = fedmpi.run("fedavg", {"rounds": 1, "data.clients": 5, "model.hidden": [4], "participation.clients": "all"})
    assert run.summary["clients"] == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.client=3"], "did you mean data.clients"),
        (["data.clients=2.5"], "data.clients = 2.5 does not suit digits"),
        (["data.partition=shards"], "'dirichlet' or 'iid'"),
        (["data.shards=shards/mnist", "data.clients=3"], 'means nothing here: it needs data.shards = "digits"'),
    ],
)
def test_options_that_do_not_suit_are_refused_with_the_configuration(settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config(None, settings)


def test_the_digits_are_listed_among_what_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    list_parts("data source")
    listed = capsys.readouterr().out
    assert "data source  (data.shards)" in listed and "clients (int, default: 20)  N, at most" in listed
    assert "source: fedmpi.data.digits_options" in listed
    show_part("digits:clients=50", "data source")
    assert "data.alpha (float, default: 1.0)" in capsys.readouterr().out
    with pytest.raises(UserError, match="digits' names a data source and a data set: say which, as with --kind \"data"):
        show_part("digits", None)


def numbered(**options: Any) -> fedmpi.ClientArrays:
    """A client for every number given."""
    owner = np.repeat(np.arange(len(options)), list(options.values()))
    x = np.arange(len(owner), dtype=np.float32).reshape(-1, 1)
    return fedmpi.ClientArrays(x, owner % 2, owner, test=(x, owner % 2))


def test_the_kind_of_data_of_ones_own_is_known_by_what_it_returns() -> None:
    assert describe("tests.data.test_digits:numbered").kind == "data source"


def test_a_part_that_takes_options_of_any_name_is_shown_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_part("tests.data.test_digits:numbered", None)
    assert "\n  options of any name\n" in capsys.readouterr().out
    show_part("digits", "data source")
    assert "any name" not in capsys.readouterr().out


def test_data_of_ones_own_may_take_options_that_the_digits_have_too() -> None:
    config = load_config(
        None, ["preset=fedavg", "data.shards=tests.data.test_digits:numbered", "data.alpha=2", "data.other=3"]
    )
    assert open_store(config.data.shards, data_options(config)).sizes.tolist() == [2, 3]


def test_class_counts_and_views_agree() -> None:
    store = open_store("digits:clients=9,alpha=0.1")
    for client in range(9):
        counts = np.bincount(store.client(client)[1], minlength=10)
        np.testing.assert_array_equal(store.class_counts(np.array([client]))[0], counts)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("digits:client=3", "did you mean clients"),
        ("digits:clients", "key=value"),
        ("digits:clients=many", "not a number"),
        ("digits:clients=0", "at least one"),
        ("digits:clients=5000", "1442"),
        ("digits:alpha=nan", "impossible"),
        ("digits:partition=shards", "choose dirichlet or iid"),
        ("digits:seed=-1", "impossible"),
    ],
)
def test_impossible_options_are_refused_in_a_sentence(where: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_store(where)
