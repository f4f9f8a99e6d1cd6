"""The embedded digits: a fixed split, a fixed default partition, options with clear errors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.data.opening import load_digits_split, open_store


def test_every_fifth_image_of_a_class_is_for_testing() -> None:
    x, y, test_x, test_y = load_digits_split()
    assert len(x) + len(test_x) == 1797 and x.shape[1:] == (1, 8, 8) and x.max() == 16
    np.testing.assert_array_equal(np.bincount(test_y), (np.bincount(y) + np.bincount(test_y)) // 5)


@pytest.mark.slow
def test_a_run_that_needs_no_strata_waits_neither_for_scikit_learn_nor_for_torchs_compiler() -> None:
    code = "import sys, fedmpi; fedmpi.run('fedavg', {'rounds': 1}); print([name for name in "
    code += "('sklearn', 'scipy.stats', 'matplotlib', 'torch._dynamo') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_default_is_twenty_mildly_heterogeneous_clients_always_the_same() -> None:
    first, second = open_store("digits"), open_store("digits")
    assert first.clients == 20 and first.samples == 1442 and first.sizes.min() > 0 and np.ptp(first.sizes) > 0
    x, y = first.rows(np.arange(1442))
    np.testing.assert_array_equal(x, second.rows(np.arange(1442))[0])
    labels = {image.tobytes(): label for image, label in zip(*load_digits_split()[:2], strict=True)}
    assert [labels[image.tobytes()] for image in x] == y.tolist()


def test_options_are_read_from_the_name_and_the_mapping() -> None:
    store = open_store("digits:clients=7, partition=iid", {"seed": 3})
    assert store.clients == 7 and np.ptp(store.sizes) <= 1 and store.manifest.partition == "iid"
    assert store.manifest.seed == 3


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("digits:client=3", "did you mean clients"),
        ("digits:clients", "key=value"),
        ("digits:clients=many", "data.source.clients = 'many' does not suit digits"),
        ("digits:clients=1443,partition=iid", "1442"),
        ("digits:alpha=nan", "data.source.alpha"),
    ],
)
def test_impossible_options_are_rejected_in_a_sentence(where: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_store(where)
