"""Unions of whole numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedmpi.common.apportionment import united

NUMBERS = arrays(np.int64, st.integers(0, 20), elements=st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1))


@given(NUMBERS, NUMBERS)
def test_a_union_holds_every_number_of_either_once_and_sorted(some: np.ndarray, others: np.ndarray) -> None:
    found = united(some, others)
    assert found.dtype == np.int64 and found.tolist() == sorted({*some.tolist(), *others.tolist()})
