"""CINIC-10: CIFAR-10's classes with ImageNet images added, 32 x 32, as a folder of PNG files (Darlow et al. 2018)."""

from __future__ import annotations

from pathlib import Path

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.cifar import CLASSES
from data_prep.datasets.folders import ImageForm, survey
from data_prep.datasets.raw_files import folder_of
from data_prep.raw import RawDataset
from data_prep.sources import Source
from fedmpi.common.errors import UserError

FORM = ImageForm(3, 32, 32)
HINT = "the unpacked CINIC-10 folder (train/, valid/ and test/ with one folder of PNG files a class)"


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """CINIC-10 from train/ and test/, valid/ is left alone; features (3, 32, 32) uint8."""
    root = _root(folder_of(raw))
    train = survey([root / "train"], CLASSES, FORM, tally)
    test = survey([root / "test"], CLASSES, FORM, tally)
    return RawDataset(
        name=CINIC10.name,
        task="image",
        classes=len(CLASSES),
        class_names=CLASSES,
        feature_shape=FORM.shape,
        dtype="uint8",
        mean=(0.4789, 0.4723, 0.4305),
        std=(0.2421, 0.2383, 0.2587),
        labels=train.labels,
        users=None,
        user_names=None,
        read=train,
        test_x=test.stored(),
        test_y=test.labels,
        skipped=tally.unreadable,
        licence=CINIC10.licence,
        citation=CINIC10.citation,
    )


def _root(folder: Path) -> Path:
    for candidate in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir() and path.name != "train")):
        if (candidate / "train").is_dir() and (candidate / "test").is_dir():
            return candidate
    raise UserError(f"no train/ and test/ below {folder}; --raw must hold {HINT}")


CINIC10 = DataSet(
    name="cinic10",
    samples="90,000 + 90,000",
    classes="10",
    licence="CC BY 4.0 (the collection, Edinburgh DataShare); ImageNet's terms for its images",
    citation="L. N. Darlow, E. J. Crowley, A. Antoniou, A. J. Storkey, CINIC-10 is not ImageNet or CIFAR-10, 2018",
    page="https://datashare.ed.ac.uk/handle/10283/3192",
    files=HINT,
    read=read,
    sources=(
        Source(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            "md5:6ee4d0c996905fe93221de577967a372",
        ),
    ),
)
