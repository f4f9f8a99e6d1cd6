"""Type names of the arrays that packages exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]
"""Array of any dtype: stored samples, results of custom components, MPI messages."""
Bytes = NDArray[np.uint8]
"""Memory of an array or a text for MPI and shared memory; not one-byte numbers such as pixels."""
