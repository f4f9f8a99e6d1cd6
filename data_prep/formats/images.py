"""Image folders with one folder per class: indexed once, then decoded on demand. Includes CINIC-10."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple
from warnings import catch_warnings

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from data_prep.formats.cifar import CLASSES
from data_prep.formats.files import files_below, folder_of, is_hidden, part_of, stored
from data_prep.holdout import hold_out_test
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, Understood, measured
from fedmpi.common.errors import UserError, raised
from fedmpi.common.types import Ints

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
"""Endings of image files; files with other endings are images if their content is one."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000")
DEEP_GREY = {"I;16", "I;16L", "I;16B", "I;16N"}
GREY_MODES = {"L", "1", "LA"} | DEEP_GREY
UNRANGED = {"I", "F"}
TURNS = dict(zip(range(2, 9), map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), strict=True))
"""Transpositions that turn an image upright, by its EXIF orientation."""
SHOWN = 4
STATISTICS_ROWS = 2000
SIZES_LISTED = 4
MOST_PIXELS = 2**26
"""Largest number of pixels of an image, since a small file may claim to be larger than memory."""


@dataclass(frozen=True)
class ImageForm:
    """Common form of all images: channels (1 or 3), height and width; images of other sizes are resized if allowed.

    `white` is the 16-bit grey value that becomes 255.
    """

    channels: int
    height: int
    width: int
    resize: bool = False
    white: int = 2**16 - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.channels, self.height, self.width


@dataclass(frozen=True)
class ImageRows:
    """Images given by their paths and decoded on demand."""

    paths: tuple[Path, ...]  # Paths of the images
    labels: Ints  # (n,): Classes of the images
    form: ImageForm  # Form to decode to

    def __call__(self, index: Ints) -> NDArray[np.uint8]:
        """Decode the images of these rows, uint8 (r, C, H, W)."""
        out = np.empty((len(index), *self.form.shape), np.uint8)
        for place, row in enumerate(index):
            try:
                out[place] = decode(self.paths[row], self.form)
            except Exception as error:  # decoders raise many kinds of errors
                raise UserError(
                    f"{self.paths[row]} cannot be decoded ({raised(error)}); remove it and run again"
                ) from error
        return out

    def stored(self) -> NDArray[np.uint8]:
        """Decode all images into a temporary file, uint8 (n, C, H, W)."""
        return stored(self, np.arange(len(self.paths)), self.form.shape, np.uint8)


def decode(path: Path | BinaryIO, form: ImageForm) -> NDArray[np.uint8]:
    """Decode one image file to uint8 (C, H, W): grey or RGB, upright, with a white background if it is transparent.

    16-bit grey values, 0 to `form.white`, are scaled to 0 to 255.
    """
    with _opened(path) as image:
        turn = TURNS.get(_orientation(image))
        picture: Image.Image = image
        if _is_deep(image):
            values = np.minimum(np.asarray(image), form.white) / (form.white / 255)
            picture = Image.fromarray(np.rint(values).astype(np.uint8))
        elif _has_alpha(image):
            picture = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        picture = picture.convert("L" if form.channels == 1 else "RGB")
    if turn is not None:
        picture = picture.transpose(turn)
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


def _is_deep(image: Image.Image) -> bool:
    """Check whether an image is 16-bit grey; some versions of Pillow read such files as 32 bits."""
    return image.mode in DEEP_GREY or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or "transparency" in image.info


def _is_grey(image: Image.Image) -> bool:
    if image.mode == "P":
        palette = np.array(image.getpalette()).reshape(-1, 3)
        return bool((palette == palette[:, :1]).all())
    return image.mode in GREY_MODES or _is_deep(image)


def _remarks(image: Image.Image, orientation: int, deep: bool) -> Iterator[tuple[str, bool]]:
    """Yield each change that `decode` makes to an image, and whether it applies to this opened, undecoded one."""
    yield "were turned upright by their EXIF orientation", orientation in TURNS
    yield "may be transparent; transparent pixels are white", _has_alpha(image) and not deep
    yield (
        "have 16 bits and colors or transparency; the lower 8 bits are dropped",
        ";16" in str(getattr(image, "tile", "")) and not deep,
    )
    frames = image.format != "MPO" and getattr(image, "is_animated", False)  # cameras add a preview as a second frame
    yield "have several frames or pages; only the first one is read", frames


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; Pillow itself rotates TIFF images. An unreadable value means upright."""
    try:
        exif = Image.Image.getexif(image)  # PngImageFile's decodes the whole image
        return 1 if image.format == "TIFF" else int(exif.get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises many kinds of errors on damaged EXIF data
        return 1


def sub_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, in alphabetical order, without hidden ones and those of tools."""
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)))


def direct_images(folder: Path) -> int:
    """Count the images directly in a folder."""
    return sum(path.is_file() and not is_hidden(path.name) and is_image(path) for path in folder.iterdir())


def is_image(path: Path) -> bool:
    """Check whether a file is an image by its ending or its content."""
    if path.suffix.lower() in SUFFIXES:
        return True
    try:
        with _opened(path):
            return True
    except Exception:  # Pillow raises many kinds of errors on other content
        return False


class ImageFacts(NamedTuple):
    """Facts about one image: width and height once it is upright, whether it is grey, and more.

    `deepest` is the largest 16-bit grey value, else 0; `remarks` describe how `decode` changes the image.
    """

    size: tuple[int, int]
    grey: bool
    deepest: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """Readable images of class folders, in path order."""

    paths: tuple[Path, ...]
    labels: Ints  # (n,)
    facts: tuple[ImageFacts, ...]
    names: tuple[str, ...] = ()  # Names of the classes
    unused: tuple[tuple[str, str], ...] = ()  # (str, str): Files and folders without samples, and why

    def rows(self, form: ImageForm) -> ImageRows:
        """Return the images in a form: all of them if it resizes, else those of its size."""
        fits = np.array([form.resize or facts.size == (form.width, form.height) for facts in self.facts], bool)
        return ImageRows(tuple(self.paths[row] for row in np.flatnonzero(fits)), self.labels[fits], form)


def look(folders: list[Path], names: tuple[str, ...] | None, tally: Tally) -> Found:
    """Find the images of some folders of class folders, in path order, skipping those that cannot be read.

    A PNG is checked by its checksums without decoding it; any other format is decoded once.
    """
    images, others, unused = _files(folders)
    where = ", ".join(map(str, folders))
    found_names = sorted({name for name, _ in images})
    if names is not None and (unknown := sorted(set(found_names) - set(names))):
        raise UserError(
            f"{where} holds the class folder {unknown[0]!r}, which is none of the {len(names)} classes "
            f"({_listed(names)}). Rename it, or remove it (without a test part, samples are held out)"
        )
    for name in found_names:
        if not name.isprintable():
            raise UserError(f"the class folder {name!r} of {where} has a name that is no text; rename it")
    kept = [(path, name, facts) for name, path in images if (facts := image_facts(path, tally))]
    counted = ", ".join(f"{count:,} {ending}" for ending, count in sorted(others.items()))
    if not kept:
        first = tally.first_bad + (f" Of no format that is read: {counted}." if counted else "")
        raise UserError(
            f"no readable image in class folders of {where}.{first} Put the images of each class in its own folder"
        )
    if names is None:
        names = tuple(sorted({name for _, name, _ in kept}))
        unused += [(name, "no readable image in it") for name in found_names if name not in names]
    if others:
        below = ", ".join(folder.name for folder in folders)
        unused.append((f"{counted} below {below}", "no image format that is read"))
    labels = np.array([names.index(name) for _, name, _ in kept], np.int64)
    return Found(tuple(path for path, _, _ in kept), labels, tuple(facts for _, _, facts in kept), names, tuple(unused))


def _files(folders: list[Path]) -> tuple[list[tuple[str, Path]], Counter[str], list[tuple[str, str]]]:
    """Return images with class folders, counts of other files by ending, and other paths without samples and why."""
    images: list[tuple[str, Path]] = []
    others: Counter[str] = Counter()
    unused: list[tuple[str, str]] = []
    for folder in folders:
        below: dict[str, set[str]] = {}
        for name in sub_folders(folder):
            files = files_below(folder / name)
            found = [path for path in files if is_image(path)]
            others.update((path.suffix.lower() or "without an ending") for path in set(files) - set(found))
            images += [(name, path) for path in found]
            holders = {path.parent for path in found} - {folder / name}
            below[name] = {str(path.relative_to(folder / name)) for path in holders}
            if not found:
                unused.append((f"{folder.name}/{name}", "no images in it"))
        if count := direct_images(folder):
            unused.append((f"{count:,} image(s) directly in {folder.name}", "in no class folder"))
        _reject_mixed(folder, {name: inner for name, inner in below.items() if inner})
    return images, others, unused


def _reject_mixed(folder: Path, below: dict[str, set[str]]) -> None:
    """Reject class folders that contain parts or sub-folders with repeated names, since these may be the classes.

    One name alone may repeat (CLASS/images), unless it denotes a part. `below` gives the sub-folders by class folder.
    """
    for name, inner in below.items():
        parts = {part for path in inner if (part := part_of(Path(path)))}
        if "train" in parts and len(parts) > 1:
            more = f", or move the parts above the classes (train/{name})" if len(below) > 1 else ""
            raise UserError(
                f"the folder {name} of {folder} holds parts ({', '.join(sorted(parts))}). Point --raw at "
                f"{folder / name}{more}"
            )
        for other, others in below.items():
            shared = sorted(inner & others)
            if name < other and (len(shared) > 1 or any(part_of(Path(path)) for path in shared)):
                inner_part = next((Path(path).name for path in shared if part_of(Path(path))), None)
                remedy = f"move parts above the classes ({inner_part}/{name})"
                if inner_part is None:
                    remedy = "call parts train and test, or put the images of each class directly into its folder"
                raise UserError(
                    f"the folders {name} and {other} of {folder} hold the same sub-folders ({_listed(shared)}), so "
                    f"the classes are ambiguous. Point --raw at one of the two, or {remedy}"
                )


def _listed(names: Sequence[str]) -> str:
    more = f", {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def image_facts(path: Path | BinaryIO, tally: Tally, where: str = "") -> ImageFacts | None:
    """Return the facts about a readable image; count an unreadable one and return None.

    `where` names an image that is not a separate file.
    """
    where, problem = where or str(path), ""
    try:
        with _opened(path) as image:
            orientation, deep, size = _orientation(image), _is_deep(image), image.size
            remarks = tuple(remark for remark, holds in _remarks(image, orientation, deep) if holds)
            if size[0] * size[1] > MOST_PIXELS:
                problem = f"it claims {size[0]:,} x {size[1]:,} pixels, more than {MOST_PIXELS:,} in all"
            elif image.mode in UNRANGED and not deep:
                problem = "pixels of 32 bits with unknown values of black and white; convert it to 8 bits"
            elif image.format == "PNG" and not deep and image.mode != "P":
                image.verify()
            else:
                image.load()
            if not problem:
                size = image.size[::-1] if orientation > 4 else image.size
                deepest = int(np.asarray(image).max()) if deep else 0
                return ImageFacts(size, _is_grey(image), deepest, remarks)
    except UnidentifiedImageError:
        problem = "not a readable image (of no known format)"
    except Exception as error:  # decoders raise many kinds of errors
        problem = f"not a readable image ({raised(error)})"
    tally.bad(where, problem)
    return None


def read_image_folder(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read an image folder; features (C, H, W) uint8: grey if no image has colors, of common size or `image_size`."""
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
            f"--split folders needs every image in one of several folders below its class. {raw} has none. Choose rows."
        )
    names = train_part.names
    if len(names) == 1:
        tally.note(f"all images are of one class ({names[0]}); --raw must name the folder that holds the class folders")
    unused = [*unused, *(entry for part in parts for entry in part.unused)]
    data = data_set.images(
        tally,
        names,
        (train, train.labels),
        (test_part.stored(), test_part.labels),
        notes=tuple(tally.notes),
        groups=groups,
        understood=Understood(target="name of the class folder", unused=tuple(unused)),
    )
    return hold_out_test(measured(data, at_most=STATISTICS_ROWS), options.split, tally)


def _sub_folders_of_classes(paths: tuple[Path, ...], folders: list[Path]) -> Ints | None:
    """Return each image's sub-folder of its class folder, (n,); None unless all are in one of several."""
    roots = [next(folder for folder in folders if path.is_relative_to(folder)) for path in paths]
    inner = [path.relative_to(root).parts[1:-1] for path, root in zip(paths, roots, strict=True)]
    codes = {parts: code for code, parts in enumerate(dict.fromkeys(inner))}
    return np.array([codes[parts] for parts in inner], np.int64) if len(codes) > 1 and () not in codes else None


def _parts(folder: Path, tally: Tally) -> tuple[dict[str, list[Path]], list[tuple[str, str]]]:
    """Return the folders of each part and the unused ones; if no name denotes a part, `folder` is the training part.

    Folders beside the parts are skipped if a training part contains folders and no images: a class may be called train.
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
    if len(bare) < len(parts["test"] + parts["valid"]):  # an unlabeled test part beside a labeled one
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
    """Return the folder, or, while it contains folders and no images, its only folder; `classes` stay."""
    inside = sub_folders(folder)
    while len(inside) == 1 and inside[0] not in classes:
        deeper = sub_folders(folder / inside[0])
        if not deeper or direct_images(folder / inside[0]):
            break
        folder, inside = folder / inside[0], deeper
        tally.note(f"the class folders are those of {folder}")
    return folder


def common_form(folder: Path, parts: list[Found], options: ReadOptions, tally: Tally) -> ImageForm:
    """Return the form that all images share or are resized to, or, if the user allows it, the most frequent one.

    16-bit grey is scaled by the bits that the training part, `parts[0]`, uses.
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


def read_cinic10(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read CINIC-10 from train/ and test/, without valid/; features (3, 32, 32) uint8."""
    folder = folder_of(raw)
    below = sorted(path for path in folder.rglob("*") if path.is_dir() and path.name != "train")
    root = next((path for path in (folder, *below) if (path / "train").is_dir() and (path / "test").is_dir()), None)
    if root is None:
        raise UserError(f"no train/ and test/ below {folder}; --raw must hold {data_set.files}")
    form, parts = ImageForm(3, 32, 32), []
    for name in ("train", "test"):
        found = look([root / name], CLASSES, tally)
        for path, facts in zip(found.paths, found.facts, strict=True):
            if facts.size != (form.width, form.height):
                tally.bad(
                    str(path), f"{facts.size[0]} x {facts.size[1]} pixels instead of {form.width} x {form.height}"
                )
        parts.append(found.rows(form))
    (train, test), statistics = parts, ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))
    tested = test.stored(), test.labels
    return data_set.images(tally, CLASSES, (train, train.labels), tested, mean=statistics[0], std=statistics[1])
