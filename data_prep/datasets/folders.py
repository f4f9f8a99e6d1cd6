"""Image folders, one folder a class: surveyed once, then decoded on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from warnings import catch_warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from data_prep.datasets.base import Tally
from data_prep.datasets.raw_files import stored
from fedmpi.common.errors import UserError, raised
from fedmpi.common.types import Ints

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
DEEP_GREY = {"I;16", "I;16L", "I;16B", "I;16N"}
GREY_MODES = {"L", "1", "LA"} | DEEP_GREY
UNRANGED = {"I", "F"}
MOST_PIXELS = 2**26
"""Of one image: a small file may claim to be larger than memory."""


@dataclass(frozen=True)
class ImageForm:
    """What every image is turned into: channels (1 or 3), height and width; resized where sizes differ, if allowed."""

    channels: int
    height: int
    width: int
    resize: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.channels, self.height, self.width


@dataclass(frozen=True)
class ImageRows:
    """Images named by their paths and decoded when they are asked for.

    Parameters
    ----------
    paths : tuple of Path
        The images.
    labels : int64 array (n,)
        Their classes.
    form : ImageForm
        What they are turned into.
    """

    paths: tuple[Path, ...]
    labels: Ints
    form: ImageForm

    def __call__(self, index: Ints) -> NDArray[np.uint8]:
        """The images of some rows, uint8 (r, C, H, W).

        Raises
        ------
        UserError
            When a file has changed or broken since the survey.
        """
        out = np.empty((len(index), *self.form.shape), np.uint8)
        for place, row in enumerate(index):
            try:
                out[place] = decode(self.paths[row], self.form)
            except Exception as error:  # decoders raise errors of many kinds
                raise UserError(
                    f"{self.paths[row]} cannot be decoded ({raised(error)}); remove it and run again"
                ) from error
        return out

    def stored(self) -> NDArray[np.uint8]:
        """All images in a temporary file, uint8 (n, C, H, W)."""
        return stored(self, np.arange(len(self.paths)), self.form.shape, np.uint8)


def decode(path: Path | BinaryIO, form: ImageForm) -> NDArray[np.uint8]:
    """One image of a file, uint8 (C, H, W), in grey or RGB; grey values of 16 bits are scaled to 8."""
    with Image.open(path) as image:
        eight_bits = _scaled(image) if image.mode in DEEP_GREY else image
        picture = eight_bits.convert("L" if form.channels == 1 else "RGB")
    if form.resize and picture.size != (form.width, form.height):
        picture = picture.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def _scaled(image: Image.Image) -> Image.Image:
    """Grey values 0 ... 65535 as the nearest of 0 ... 255, both with the same black and white."""
    return Image.fromarray(np.rint(np.asarray(image) / 257.0).astype(np.uint8))


def class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the sub-folders, in alphabetical order: the classes.

    Raises
    ------
    UserError
        When there is none.
    """
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    for name in names:
        if not name.isprintable():
            raise UserError(f"the class folder {name!r} of {folder} has a name that is no text; rename it")
    if not names:
        raise UserError(f"{folder} holds no class folders; the images of each class belong in a folder of its own")
    return names


@dataclass(frozen=True)
class Found:
    """Readable images of class folders, in path order.

    Parameters
    ----------
    paths : tuple of Path
    labels : int64 array (n,)
    sizes : tuple of (int, int)
        Width and height.
    grey : bool
        Whether none has colours.
    """

    paths: tuple[Path, ...]
    labels: Ints
    sizes: tuple[tuple[int, int], ...]
    grey: bool

    def rows(self, form: ImageForm) -> ImageRows:
        """The images in a form: all of them where it resizes, else those of its size."""
        fits = np.array([form.resize or size == (form.width, form.height) for size in self.sizes], bool)
        return ImageRows(tuple(self.paths[row] for row in np.flatnonzero(fits)), self.labels[fits], form)


def survey(folders: list[Path], names: tuple[str, ...], form: ImageForm, tally: Tally) -> ImageRows:
    """The images of some folders of class folders that have the size of a form; others count as unreadable.

    Parameters and errors are those of `look`.
    """
    found = look(folders, names, tally)
    for path, size in zip(found.paths, found.sizes, strict=True):
        if size != (form.width, form.height):
            tally.bad(str(path), f"{size[0]} x {size[1]} pixels instead of {form.width} x {form.height}")
    return found.rows(form)


def look(folders: list[Path], names: tuple[str, ...], tally: Tally) -> Found:
    """Find the images of some folders of class folders, in path order, leaving out those that cannot be read.

    A PNG is checked by its checksums without decoding it, any other format is decoded once.

    Parameters
    ----------
    folders : list of Path
        Each holds class folders.
    names : tuple of str
        The classes, in label order.
    tally : Tally
        Receives the images left out.

    Raises
    ------
    UserError
        When a folder names an unknown class, or no image can be read.
    """
    paths: list[Path] = []
    labels: list[int] = []
    sizes: list[tuple[int, int]] = []
    grey = True
    for folder in folders:
        found = class_folders(folder)
        if set(found) - set(names):
            raise UserError(f"{folder} holds the class folder {min(set(found) - set(names))!r}, which is no class here")
        for name in found:
            for path in sorted((folder / name).rglob("*")):
                if (
                    path.suffix.lower() in SUFFIXES
                    and path.is_file()
                    and (facts := image_facts(path, tally)) is not None
                ):
                    paths.append(path)
                    labels.append(names.index(name))
                    sizes.append(facts[0])
                    grey = grey and facts[1]
    if not paths:
        raise UserError(
            f"no readable image below {', '.join(map(str, folders))}; each must hold one folder a class with "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    return Found(tuple(paths), np.array(labels, np.int64), tuple(sizes), grey)


def image_facts(path: Path | BinaryIO, tally: Tally, where: str = "") -> tuple[tuple[int, int], bool] | None:
    """Width and height, and whether it is grey, of an image that can be read; None, and counted, of one that cannot.

    `where` names one that is no file of its own.
    """
    where = where or str(path)
    try:
        with catch_warnings(action="ignore"), Image.open(path) as image:
            size, mode = image.size, image.mode
            if image.format == "PNG":
                image.verify()
            else:
                image.load()
    except UnidentifiedImageError:
        tally.bad(where, "not a readable image (of no known format)")
        return None
    except Exception as error:  # decoders raise errors of many kinds
        tally.bad(where, f"not a readable image ({raised(error)})")
        return None
    if size[0] * size[1] > MOST_PIXELS:
        tally.bad(where, f"it claims {size[0]:,} x {size[1]:,} pixels, more than {MOST_PIXELS:,} in all")
        return None
    if mode in UNRANGED:
        tally.bad(where, "pixels of 32 bits, whose black and white nobody can tell; convert it to 8 bits")
        return None
    return size, mode in GREY_MODES
