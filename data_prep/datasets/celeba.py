"""CelebA by celebrity, as LEAF splits it: does the face smile? (Liu et al. 2015; Caldas et al. 2018)"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.folders import SUFFIXES, ImageForm, ImageRows, image_facts
from data_prep.datasets.leaf import CITATION, HINT, PAGE, leaf_users, pairs, require_leaf
from data_prep.datasets.raw_files import Names, compact, files_below, folder_of
from data_prep.raw import RawDataset, measured
from fedmpi.common.errors import UserError

SIZE = (84, 84)
STATISTICS_ROWS = 2000


@dataclass
class _Part:
    paths: list[Path] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)

    def rows(self, form: ImageForm) -> ImageRows:
        return ImageRows(tuple(self.paths), np.array(self.labels, np.int64), form)


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Faces in colour, resized to `image_size` (84 x 84, as LEAF's model reads them); the celebrity is the client."""
    folder = folder_of(raw)
    pictures = {path.name: path for path in files_below(folder) if path.suffix.lower() in SUFFIXES}
    names, parts = Names(), []
    for files in require_leaf(folder, " beside the folder img_align_celeba"):
        part = _Part()
        for path in files:
            for name, samples in leaf_users(path, pairs, "celebrity"):
                for row, (file, label) in enumerate(samples):
                    where = f"{path}, celebrity {name}, record {row}"
                    if type(label) not in (int, float) or label not in (0, 1):
                        tally.bad(where, f"the label is {label!r} instead of 0 or 1")
                    elif type(file) is not str or file not in pictures:
                        tally.bad(where, f"there is no picture {file!r} below {folder}")
                    elif image_facts(pictures[file], tally) is not None:
                        part.paths.append(pictures[file])
                        part.labels.append(int(label))
                        part.users.append(names.code(name))
        parts.append(part)
    for part, which in zip(parts, ("training", "test"), strict=True):
        if not part.paths:
            first = f": the first that is none: {tally.first}" if tally.first else ""
            raise UserError(f"{folder} holds no readable {which} picture{first}")
    width, height = options.image_size or SIZE
    form = ImageForm(3, height, width, resize=True)
    train, test = (part.rows(form) for part in parts)
    users, user_names = compact(np.array(parts[0].users, np.int64), names.names)
    data = RawDataset(
        name=CELEBA.name,
        task="image",
        classes=2,
        class_names=("not smiling", "smiling"),
        feature_shape=form.shape,
        dtype="uint8",
        mean=(),
        std=(),
        labels=train.labels,
        users=users,
        user_names=user_names,
        read=train,
        test_x=test.stored(),
        test_y=test.labels,
        skipped=tally.unreadable,
        licence=CELEBA.licence,
        citation=CELEBA.citation,
    )
    return measured(data, at_most=STATISTICS_ROWS)


CELEBA = DataSet(
    name="celeba",
    samples="200,288 of 9,343 celebrities",
    classes="2",
    licence="non-commercial research only (CelebA's agreement)",
    citation=f"Z. Liu, P. Luo, X. Wang, X. Tang, Deep learning face attributes in the wild, 2015; {CITATION}",
    page=PAGE,
    files=f"{HINT}, and the folder img_align_celeba with the pictures",
    read=read,
    options=frozenset({"image_size"}),
)
