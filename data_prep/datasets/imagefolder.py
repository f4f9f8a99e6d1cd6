"""Images of the user's own: one folder a class, with or without a train/ and a test/ folder above."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.folders import Found, ImageForm, class_folders, look
from data_prep.datasets.raw_files import folder_of
from data_prep.holdout import holding_out
from data_prep.raw import RawDataset, measured
from fedmpi.common.errors import UserError

HINT = "DIR/train/CLASS/*.png and DIR/test/CLASS/*.png, or DIR/CLASS/*.png (a fifth is then held out for testing)"
STATISTICS_ROWS = 2000
SIZES_LISTED = 4


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """An image folder; features (C, H, W) uint8: grey where no image has colours, of their size or `image_size`."""
    folder = folder_of(raw)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        names = class_folders(folder / "train")
        parts = [look([folder / part], names, tally) for part in ("train", "test")]
        form = common_form(folder, parts, options, tally)
        train, test = (part.rows(form) for part in parts)
    else:
        names = class_folders(folder)
        everything = look([folder], names, tally)
        train = everything.rows(common_form(folder, [everything], options, tally))
        test = replace(train, paths=(), labels=train.labels[:0])
    for part, images in (("training", train), ("test", test)):
        if not len(images.paths) and (images is train or (folder / "test").is_dir()):
            raise UserError(f"{folder} holds no usable {part} image")
    data = RawDataset(
        name=IMAGEFOLDER.name,
        task="image",
        classes=len(names),
        class_names=names,
        feature_shape=train.form.shape,
        dtype="uint8",
        mean=(),
        std=(),
        labels=train.labels,
        users=None,
        user_names=None,
        read=train,
        test_x=test.stored(),
        test_y=test.labels,
        skipped=tally.unreadable,
        licence=IMAGEFOLDER.licence,
        citation=IMAGEFOLDER.citation,
    )
    return measured(data, at_most=STATISTICS_ROWS)


def common_form(folder: Path, parts: list[Found], options: ReadOptions, tally: Tally) -> ImageForm:
    """The form that all images share, are resized to, or, where the user says so, that most have.

    Raises
    ------
    UserError
        When sizes differ and the user does not say what to do.
    """
    channels = 1 if all(part.grey for part in parts) else 3
    if options.image_size is not None:
        if options.skip_odd_sizes:
            raise UserError("--image-size makes all images one size, so none is odd; leave out --skip-odd-sizes")
        return ImageForm(channels, options.image_size[1], options.image_size[0], resize=True)
    sizes = Counter(size for part in parts for size in part.sizes)
    (width, height), most = sizes.most_common(1)[0]
    others = sizes.total() - most
    if others and not options.skip_odd_sizes:
        listed = ", ".join(f"{count:,} of {w} x {h}" for (w, h), count in sizes.most_common(SIZES_LISTED))
        more = f", {len(sizes) - SIZES_LISTED} more sizes" if len(sizes) > SIZES_LISTED else ""
        raise UserError(
            f"{folder} holds images of {len(sizes)} sizes ({listed}{more}); resize all, e.g. with --image-size "
            f"{width}x{height}, or leave out the {others:,} that are not {width} x {height} with --skip-odd-sizes"
        )
    if others:
        tally.drop(f"images of another size than {width} x {height}", others)
    return ImageForm(channels, height, width)


IMAGEFOLDER = DataSet(
    name="imagefolder",
    samples="yours",
    classes="yours",
    licence="yours",
    citation="yours",
    page="",
    files=HINT,
    read=holding_out(read),
    options=frozenset({"image_size", "skip_odd_sizes", "split"}),
)
