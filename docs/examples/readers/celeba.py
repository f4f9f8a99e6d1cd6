"""CelebA by celebrity as LEAF splits it (does the face smile?): python -m data_prep celeba:read --raw DIR.

Z. Liu et al., Deep learning face attributes in the wild, 2015; S. Caldas et al., LEAF, 2018. DIR holds LEAF's
train/*.json and test/*.json, and the folder img_align_celeba.
"""

from pathlib import Path

import numpy as np

from data_prep.formats.images import ImageForm, reader_of
from data_prep.formats.leaf import leaf_files, leaf_users
from data_prep.raw import RawDataset, measure


def read(raw: Path, *, size: int = 84) -> RawDataset:
    """Faces in color, resized; the celebrity is the natural client.

    Parameters
    ----------
    size : int
        Width and height in pixels, 84 as LEAF's model reads them.
    """
    pictures = {path.name: path for path in raw.rglob("img_align_celeba/*")}
    paths, labels, celebrities, ends = [], [], [], []
    for files in leaf_files(raw, "LEAF's files and img_align_celeba"):
        for name, names, smiles in (user for path in files for user in leaf_users(path, "celebrity")):
            paths += [pictures[picture] for picture in names]
            labels += smiles
            celebrities += [name] * len(names)
        ends.append(len(paths))
    names, users = np.unique(celebrities, return_inverse=True)
    rows = np.arange(len(paths))
    return RawDataset(
        name="celeba",
        task="image",
        classes=2,
        class_names=("not smiling", "smiling"),
        feature_shape=(3, size, size),
        dtype="uint8",
        read=reader_of(paths, ImageForm(3, size, size, resize=True)),
        y=np.array(labels, np.int64),
        train=rows[: ends[0]],
        test=rows[ends[0] :],
        users=users,
        user_names=tuple(names.tolist()),
        fit=measure,
    )
