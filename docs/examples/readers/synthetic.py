"""LEAF's synthetic vectors by user: python -m data_prep synthetic:read --raw DIR.

S. Caldas et al., LEAF: a benchmark for federated settings, 2018, appendix. DIR holds train/*.json and test/*.json.
"""

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.leaf import leaf_files, leaf_users


def read(raw: Path) -> dict[str, Any]:
    """Vectors of float32; the user is the natural client."""
    found: dict[str, list[Any]] = {"x": [], "y": [], "user": [], "x_test": [], "y_test": []}
    for files, part in zip(leaf_files(raw, "LEAF's train/*.json and test/*.json"), ("", "_test"), strict=True):
        for path in files:
            for name, x, y in leaf_users(path):
                found[f"x{part}"].append(np.asarray(x))
                found[f"y{part}"].append(np.asarray(y, np.int64))
                if not part:
                    found["user"].append(np.repeat(name, len(y)))
    return {name: np.concatenate(blocks) for name, blocks in found.items()}
