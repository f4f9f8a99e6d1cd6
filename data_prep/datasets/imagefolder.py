"""Images of users: one folder per class, with or without folders of the parts above."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.folders import Found, ImageForm, direct_images, look, sub_folders
from data_prep.datasets.raw_files import folder_of, part_of
from data_prep.holdout import holding_out
from data_prep.raw import RawDataset, Understood, measured
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

HINT = "DIR/train/CLASS/* and DIR/test/CLASS/*, or DIR/CLASS/* (a part is then held out for testing)"
STATISTICS_ROWS = 2000
SIZES_LISTED = 4


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """An image folder; features (C, H, W) uint8: grey where no image has colours, of their size or `image_size`."""
    if options.split not in ("rows", "folders"):
        raise UserError(
            f"--split {options.split} is unknown for image folders. Choose rows, or folders (CLASS/PATIENT/*: all "
            "images of a folder in the same part)."
        )
    folders, unused = _parts(_entered(folder_of(raw), tally), tally)
    trained = [_entered(folder, tally) for folder in folders["train"]]
    train_part = look(trained, None, tally)
    parts = [train_part]
    if test := folders["test"] or folders["valid"]:
        inside = [_entered(folder, tally, train_part.names) for folder in test]
        if bare := [folder for folder in inside if not sub_folders(folder)]:
            raise UserError(
                f"{bare[0]} has no class folders, so its images have no classes. Put those of each class in a folder, "
                f"or point --raw at {folders['train'][0]} to hold out a part of that"
            )
        parts.append(look(inside, train_part.names, tally))
    form = common_form(raw, parts, options, tally)
    rows = [part.rows(form) for part in parts]
    for part, images in zip(("training", "test"), rows, strict=False):
        if not len(images.paths):
            raise UserError(
                f"{raw} holds no {part} image of {form.width} x {form.height} pixels. Resize all with --image-size"
            )
    train = rows[0]
    test_part = rows[1] if len(rows) > 1 else replace(train, paths=(), labels=train.labels[:0])
    groups = _sub_folders_of_classes(train.paths, trained)
    if options.split == "folders" and groups is None and len(rows) == 1:
        raise UserError(
            f"--split folders needs every image in one of several folders below its class, unlike {raw}. Choose rows."
        )
    names = train_part.names
    if len(names) == 1:
        tally.note(f"all images are of one class ({names[0]}); --raw must name the folder that holds the class folders")
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
        test_x=test_part.stored(),
        test_y=test_part.labels,
        skipped=tally.unreadable,
        licence=IMAGEFOLDER.licence,
        citation=IMAGEFOLDER.citation,
        notes=tuple(tally.notes),
        groups=groups,
        understood=Understood(
            target="name of the class folder", unused=(*unused, *(entry for part in parts for entry in part.unused))
        ),
    )
    return measured(data, at_most=STATISTICS_ROWS)


def _sub_folders_of_classes(paths: tuple[Path, ...], folders: list[Path]) -> Ints | None:
    """The folder below its class folder in which each image lies, (n,); None unless all lie in one of several."""
    roots = [next(folder for folder in folders if path.is_relative_to(folder)) for path in paths]
    inner = [path.relative_to(root).parts[1:-1] for path, root in zip(paths, roots, strict=True)]
    codes = {parts: code for code, parts in enumerate(dict.fromkeys(inner))}
    return np.array([codes[parts] for parts in inner], np.int64) if len(codes) > 1 and () not in codes else None


def _parts(folder: Path, tally: Tally) -> tuple[dict[str, list[Path]], list[tuple[str, str]]]:
    """The folders of each part, and those that are none; where the names mean no parts, `folder` is the training part.

    Folders beside the parts are left out if a training part holds folders and no images: a class may be called train.
    """
    parts: dict[str, list[Path]] = {"train": [], "test": [], "valid": [], "": []}
    for name in sub_folders(folder):
        parts[part_of(Path(name)) or ""].append(folder / name)
    others = parts.pop("")
    named = {part: ", ".join(path.name for path in found) for part, found in parts.items() if found}
    inner = [path for found in parts.values() for path in found]
    if not named or (others and not any(sub_folders(path) and not direct_images(path) for path in parts["train"])):
        return {"train": [folder], "test": [], "valid": []}, []
    if not any(map(sub_folders, inner)):
        raise UserError(
            f"{folder} has parts ({', '.join(named.values())}) without class folders. Put the images of each class in "
            "a folder (train/CLASS), or give classes names without such words"
        )
    if "train" not in named:
        raise UserError(
            f"{folder} has parts ({', '.join(named.values())}) and no training part. Name a folder train, or give "
            "classes names without such words"
        )
    if others and len(named) == 1:
        raise UserError(
            f"{folder} holds the training part {named['train']}, and {others[0].name}, which is no part. Point "
            f"--raw at {inner[0]}, or name the other folder test"
        )
    unused = [(path.name, "its name means no part") for path in others]
    bare = [path for part in ("test", "valid") for path in parts[part] if not sub_folders(path)]
    if len(bare) < len(parts["test"] + parts["valid"]):  # a test part without labels beside one that has them
        parts = {part: [path for path in found if path not in bare] for part, found in parts.items()}
        unused += [(path.name, "no class folders in it") for path in bare]
    named = {part: ", ".join(path.name for path in found) for part, found in parts.items() if found}
    if "valid" in named:
        tally.note(f"the validation part ({named['valid']}) is {'left alone' if 'test' in named else 'the test part'}")
    for part, found in parts.items():
        if len(found) > 1:
            tally.note(f"several folders are one part ({part}): {named[part]}")
    return parts, unused


def _entered(folder: Path, tally: Tally, classes: tuple[str, ...] = ()) -> Path:
    """The folder itself, or the only folder in it, as long as that holds folders and no images; `classes` stay."""
    inside = sub_folders(folder)
    while len(inside) == 1 and inside[0] not in classes:
        deeper = sub_folders(folder / inside[0])
        if not deeper or direct_images(folder / inside[0]):
            break
        folder, inside = folder / inside[0], deeper
        tally.note(f"the class folders are those of {folder}")
    return folder


def common_form(folder: Path, parts: list[Found], options: ReadOptions, tally: Tally) -> ImageForm:
    """The form that all images share, are resized to, or, where the user says so, that most have.

    Grey of 16 bits is scaled by the bits that the training part, `parts[0]`, uses.
    """
    found = [facts for part in parts for facts in part.facts]
    for remark, count in Counter(remark for facts in found for remark in facts.remarks).items():
        tally.note(f"{count:,} images {remark}")
    channels = 1 if all(facts.grey for facts in found) else 3
    deepest = max(facts.deepest for facts in parts[0].facts)
    bits = max(8, deepest.bit_length()) if deepest else 16
    if bits < 16:
        tally.note(f"gray images of 16 bits use {bits} bits; the values 0 to {2**bits - 1:,} are scaled to 0 to 255")
    if brighter := sum(facts.deepest >= 2**bits for facts in found):
        tally.note(f"{brighter:,} images of the test part have larger values, which become 255")
    form = ImageForm(channels, 0, 0, white=2**bits - 1)
    if options.image_size is not None:
        if options.skip_odd_sizes:
            raise UserError("--image-size makes all images one size, so none is odd; leave out --skip-odd-sizes")
        return replace(form, height=options.image_size[1], width=options.image_size[0], resize=True)
    sizes = Counter(facts.size for facts in found)
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
    return replace(form, height=height, width=width)


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
