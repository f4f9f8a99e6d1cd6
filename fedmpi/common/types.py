"""Names of the arrays that travel between rooms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
AnyArray = NDArray[Any]
