"""Values that no model can be trained on are found wherever they lie in a shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.data import shards
from fedmpi.data.shards import check_features
from tests.local.synthetic import SMALL_IMAGES, TEXTS

HERE = Path("train.h5")


@pytest.mark.parametrize("at_once", [1, 100, 10**6])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_feature_that_is_not_finite_is_named_by_its_row(
    at_once: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "VALUES_AT_ONCE", at_once)
    x = np.ones((9, 1, 6, 6), np.float32)
    check_features(HERE, x, SMALL_IMAGES)
    x[7, 0, 2, 3] = bad
    with pytest.raises(UserError, match=f"row 7 of train.h5 holds {bad}, which is not a finite number"):
        check_features(HERE, x, SMALL_IMAGES)


@pytest.mark.parametrize("bad", [-1, 60])
def test_one_token_outside_the_vocabulary_is_named_by_its_row(bad: int) -> None:
    x = np.tile(np.arange(12, dtype=np.int32), (5, 1))
    x[1, 4], x[2, 3] = 59, 0
    check_features(HERE, x, TEXTS)
    x[3, 11] = bad
    with pytest.raises(UserError, match=f"row 3 of train.h5 holds {bad}, which is no word of the 60"):
        check_features(HERE, x, TEXTS)
