"""Image folders with one folder per class: indexed once, then decoded on demand. Includes CINIC-10."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO
from warnings import catch_warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from data_prep.formats.cifar import CLASSES
from data_prep.formats.files import files_below, folder_of, is_hidden, part_of
from data_prep.holdout import hold_out_test
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, Understood, measure
from fedmpi.common.errors import UserError, raised
from fedmpi.common.types import Ints

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm", ".jp2")
"""Endings of image files."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000")
GREY_MODES = ("L", "1", "LA")
SHOWN = 4
STATISTICS_ROWS = 2000


@dataclass(frozen=True)
class ImageForm:
    """Form of an upright image, or of all: channels (1 or 3), height and width; others are resized if allowed."""

    channels: int
    height: int
    width: int
    resize: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.channels, self.height, self.width


def decoded(images: Sequence[tuple[Path | BinaryIO, str]], form: ImageForm) -> NDArray[np.uint8]:
    """Decode images, each with its name for messages, to uint8 (r, C, H, W)."""
    out = np.empty((len(images), *form.shape), np.uint8)
    for row, (image, where) in enumerate(images):
        try:
            out[row] = decode(image, form)
        except Exception as error:  # decoders raise many kinds of errors
            raise UserError(
                f"{where}: the image cannot be decoded ({raised(error)}). Remove it and run again"
            ) from error
    return out


def reader_of(paths: Sequence[Path], form: ImageForm) -> Callable[[Ints], NDArray[np.uint8]]:
    """Return a function that decodes the images of some of the paths, uint8 (r, C, H, W)."""
    return lambda rows: decoded([(paths[row], str(paths[row])) for row in rows.tolist()], form)


def decode(path: Path | BinaryIO, form: ImageForm) -> NDArray[np.uint8]:
    """Decode one image file to uint8 (C, H, W): grey or RGB, upright, with a white background if it is transparent."""
    with _opened(path) as image:
        picture = ImageOps.exif_transpose(image)
        if "A" in picture.getbands() or "transparency" in picture.info:
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
        picture = picture.convert("L" if form.channels == 1 else "RGB")
    if form.resize and picture.size != (form.width, form.height):
        picture = picture.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


@contextmanager
def _opened(path: Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image as a stream, because Pillow maps files and then misreads rotated TIFF images."""
    with ExitStack() as stack:
        stack.enter_context(catch_warnings(action="ignore"))
        stream = stack.enter_context(path.open("rb")) if isinstance(path, Path) else path
        yield stack.enter_context(Image.open(stream, formats=FORMATS))


def form_of(path: Path | BinaryIO, tally: Tally, where: str) -> ImageForm | None:
    """Return the form of a readable image; count an unreadable one and return None."""
    try:
        with _opened(path) as image:
            if image.mode[0] in "IF":
                problem = "its pixels have more than 8 bits, with an unknown value of white; convert it to 8 bits"
            else:
                width, height = ImageOps.exif_transpose(image).size
                return ImageForm(1 if image.mode in GREY_MODES else 3, height, width)
    except Exception as error:  # decoders raise many kinds of errors
        problem = f"not a readable image ({raised(error)})"
    tally.bad(where, problem)
    return None


def common_form(where: Path, forms: Sequence[ImageForm], options: ReadOptions) -> ImageForm:
    """Return the form that all images share or are resized to."""
    sizes = Counter((form.width, form.height) for form in forms)
    (width, height), _ = sizes.most_common(1)[0]
    if options.image_size is None and len(sizes) > 1:
        listed = ", ".join(f"{count:,} of {w} x {h}" for (w, h), count in sizes.most_common(SHOWN))
        more = f", {len(sizes) - SHOWN} more sizes" if len(sizes) > SHOWN else ""
        raise UserError(
            f"{where} holds images of {len(sizes)} sizes ({listed}{more}); resize all, e.g. with --image-size "
            f"{width}x{height}"
        )
    width, height = options.image_size or (width, height)
    return ImageForm(max(form.channels for form in forms), height, width, options.image_size is not None)


def sub_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, in alphabetical order, without hidden ones and those of tools."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)))


def direct_images(folder: Path) -> int:
    """Count the images directly in a folder."""
    return sum(path.suffix.lower() in SUFFIXES and not is_hidden(path.name) for path in folder.iterdir())


@dataclass(frozen=True)
class Found:
    """Readable images of class folders, in path order."""

    paths: list[Path]
    labels: Ints  # (n,)
    forms: list[ImageForm]
    names: tuple[str, ...]  # Names of the classes
    unused: list[tuple[str, str]]  # Files and folders without samples, and why


def look(folders: list[Path], names: tuple[str, ...] | None, tally: Tally) -> Found:
    """Find the images of some folders of class folders, in path order, skipping those that cannot be read.

    Every image is decoded once. `names` are the classes of the training part.
    """
    images, unused = [], []
    others: Counter[str] = Counter()
    for folder in folders:
        for name in sub_folders(folder):
            files = files_below(folder / name)
            found = [path for path in files if path.suffix.lower() in SUFFIXES]
            others.update((path.suffix.lower() or "without an ending") for path in set(files) - set(found))
            images += [(name, path) for path in found]
            if not found:
                unused.append((f"{folder.name}/{name}", "no images in it"))
        if count := direct_images(folder):
            unused.append((f"{count:,} image(s) directly in {folder.name}", "in no class folder"))
    where = ", ".join(map(str, folders))
    counted = ", ".join(f"{count:,} {ending}" for ending, count in sorted(others.items()))
    if others:
        unused.append((f"{counted} below {', '.join(folder.name for folder in folders)}", "no image format"))
    there = {name for name, _ in images}
    if names is not None and (unknown := sorted(there - set(names))):
        raise UserError(
            f"{where} holds the class folder {unknown[0]!r}, which is none of the {len(names)} classes "
            f"({', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}). Rename or remove it"
        )
    kept = [(path, name, form) for name, path in images if (form := form_of(path, tally, str(path)))]
    if not kept:
        first = tally.first_bad + (f" Of no format that is read: {counted}." if counted else "")
        raise UserError(
            f"no readable image in class folders of {where}.{first} Put the images of each class in its own folder"
        )
    known = names or tuple(sorted({name for _, name, _ in kept}))
    unused += [(name, "no readable image in it") for name in sorted(there - set(known))]
    labels = np.array([known.index(name) for _, name, _ in kept], np.int64)
    return Found([path for path, _, _ in kept], labels, [form for _, _, form in kept], known, unused)


def read_image_folder(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read an image folder; features (C, H, W) uint8: grey if no image has colors, of common size or `image_size`."""
    folders, unused = _parts(_entered(folder_of(raw), tally), tally)
    trained = [_entered(folder, tally) for folder in folders["train"]]
    parts = [look(trained, None, tally)]
    names = parts[0].names
    if tested := folders["test"] or folders["valid"]:
        parts.append(look([_entered(folder, tally, names) for folder in tested], names, tally))
    form = common_form(raw, [form for part in parts for form in part.forms], options)
    if len(names) == 1:
        tally.note(f"all images are of one class ({names[0]}); --raw must name the folder that holds the class folders")
    unused += [entry for part in parts for entry in part.unused]
    data = data_set.images(
        names,
        reader_of([path for part in parts for path in part.paths], form),
        parts[0].labels,
        parts[1].labels if tested else np.zeros(0, np.int64),
        understood=Understood(target="name of the class folder", unused=tuple(unused)),
        fit=partial(measure, at_most=STATISTICS_ROWS),
    )
    return hold_out_test(data, "rows", tally)


def _parts(folder: Path, tally: Tally) -> tuple[dict[str, list[Path]], list[tuple[str, str]]]:
    """Return the folders of each part and the unused ones; without a training part, `folder` is the training part.

    Beside other folders, a training part contains class folders and no images, since a class may be called train.
    """
    parts: dict[str, list[Path]] = {"train": [], "test": [], "valid": [], "": []}
    for name in sub_folders(folder):
        parts[part_of(Path(name)) or ""].append(folder / name)
    if not any(sub_folders(path) and not (parts[""] and direct_images(path)) for path in parts["train"]):
        if parts["test"] and parts["valid"] and not parts[""]:
            raise UserError(f"{folder} has test and validation folders, but none for training. Name one of them train")
        return {"train": [folder], "test": [], "valid": []}, []
    unused = [(path.name, "its name means no part") for path in parts.pop("")]
    bare = [path for found in parts.values() for path in found if not sub_folders(path)]
    unused += [(path.name, "no class folders in it") for path in bare]
    parts = {part: [path for path in found if path not in bare] for part, found in parts.items()}
    for part, found in parts.items():
        listed = ", ".join(path.name for path in found)
        if part == "valid" and found:
            tally.note(f"the validation part ({listed}) is {'left alone' if parts['test'] else 'the test part'}")
        if len(found) > 1:
            tally.note(f"several folders are one part ({part}): {listed}")
    return parts, unused


def _entered(folder: Path, tally: Tally, classes: tuple[str, ...] = ()) -> Path:
    """Return the folder, or, while it contains folders and no images, its only folder; `classes` stay."""
    inside = sub_folders(folder)
    while len(inside) == 1 and inside[0] not in classes:
        deeper = sub_folders(folder / inside[0])
        if not deeper or direct_images(folder / inside[0]):
            break
        folder, inside = folder / inside[0], deeper
        tally.note(f"the class folders are those of {folder}")
    return folder


def read_cinic10(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read CINIC-10 from train/ and test/, without valid/; features (3, 32, 32) uint8."""
    folder = folder_of(raw)
    below = sorted(path for path in folder.rglob("*") if path.is_dir() and path.name != "train")
    root = next((path for path in (folder, *below) if (path / "train").is_dir() and (path / "test").is_dir()), None)
    if root is None:
        raise UserError(f"no train/ and test/ below {folder}; --raw must hold {data_set.files}")
    train, test = (look([root / name], CLASSES, tally) for name in ("train", "test"))
    for path, form in zip(train.paths + test.paths, train.forms + test.forms, strict=True):
        if (form.width, form.height) != (32, 32):
            raise UserError(f"{path} has {form.width} x {form.height} pixels instead of 32 x 32. Fetch it again")
    read = reader_of(train.paths + test.paths, ImageForm(3, 32, 32))
    statistics = {"mean": (0.4789, 0.4723, 0.4305), "std": (0.2421, 0.2383, 0.2587)}
    return data_set.images(CLASSES, read, train.labels, test.labels, **statistics)
