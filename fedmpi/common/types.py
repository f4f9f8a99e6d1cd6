"""Names of the arrays that travel between rooms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]
"""Of any dtype: samples as they are stored, what a user's own parts return, what MPI carries."""
Bytes = NDArray[np.uint8]
"""The memory of an array or a text, as MPI and shared memory hold it; not numbers of one byte, such as pixels."""
