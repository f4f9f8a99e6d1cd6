"""CelebA by celebrity as LEAF splits it (does the face smile?): python -m data_prep celeba:read --raw DIR.

Z. Liu et al., Deep learning face attributes in the wild, 2015; S. Caldas et al., LEAF, 2018. DIR holds LEAF's
train/*.json and test/*.json, and the folder img_align_celeba.
"""

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.files import stored
from data_prep.formats.images import ImageForm, reader_of
from data_prep.formats.leaf import leaf_files, leaf_users


def read(raw: Path, *, size: int = 84) -> dict[str, Any]:
    """Faces in color, resized; the celebrity is the natural client.

    Parameters
    ----------
    size : int
        Width and height in pixels, 84 as LEAF's model reads them.
    """
    pictures = {path.name: path for path in raw.rglob("img_align_celeba/*")}
    found: dict[str, Any] = {}
    for files, part in zip(leaf_files(raw, "LEAF's files and img_align_celeba"), ("", "_test"), strict=True):
        users = [user for path in files for user in leaf_users(path, "celebrity")]
        paths = [pictures[name] for _, names, _ in users for name in names]
        labels = np.array([label for _, _, labels in users for label in labels], np.int64)
        form = ImageForm(3, size, size, resize=True)
        found[f"x{part}"] = stored(reader_of(paths, form), np.arange(len(paths)), form.shape, np.uint8)
        found[f"y{part}"] = labels
        if not part:
            found["user"] = np.array([name for name, names, _ in users for _ in names])
    return found
