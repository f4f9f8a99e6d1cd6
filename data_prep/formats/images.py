"""Image folders with one folder per class: indexed once, then decoded on demand. Includes CINIC-10."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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

    paths: list[Path]
    labels: Ints  # (n,)
    facts: list[ImageFacts]
    names: tuple[str, ...]  # Names of the classes
    unused: list[tuple[str, str]]  # Files and folders without samples, and why


def look(folders: list[Path], names: tuple[str, ...] | None, tally: Tally) -> Found:
    """Find the images of some folders of class folders, in path order, skipping those that cannot be read.

    A PNG is checked by its checksums without decoding it; any other format is decoded once. `names` are the classes of
    the training part.
    """
    images: list[tuple[str, Path]] = []
    others: Counter[str] = Counter()
    unused: list[tuple[str, str]] = []
    for folder in folders:
        below: dict[str, set[Path]] = {}
        for name in sub_folders(folder):
            files = files_below(folder / name)
            found = [path for path in files if is_image(path)]
            others.update((path.suffix.lower() or "without an ending") for path in set(files) - set(found))
            images += [(name, path) for path in found]
            below[name] = {path.parent.relative_to(folder / name) for path in found} - {Path()}
            if not found:
                unused.append((f"{folder.name}/{name}", "no images in it"))
        if count := direct_images(folder):
            unused.append((f"{count:,} image(s) directly in {folder.name}", "in no class folder"))
        _reject_mixed(folder, below)
    where = ", ".join(map(str, folders))
    counted = ", ".join(f"{count:,} {ending}" for ending, count in sorted(others.items()))
    if others:
        unused.append(
            (f"{counted} below {', '.join(folder.name for folder in folders)}", "no image format that is read")
        )
    there = {name for name, _ in images}
    if names is not None and (unknown := sorted(there - set(names))):
        raise UserError(
            f"{where} holds the class folder {unknown[0]!r}, which is none of the {len(names)} classes "
            f"({_listed(names)}). Rename it, or remove it (without a test part, samples are held out)"
        )
    kept = [(path, name, facts) for name, path in images if (facts := image_facts(path, tally, str(path)))]
    if not kept:
        first = tally.first_bad + (f" Of no format that is read: {counted}." if counted else "")
        raise UserError(
            f"no readable image in class folders of {where}.{first} Put the images of each class in its own folder"
        )
    known = names or tuple(sorted({name for _, name, _ in kept}))
    unused += [(name, "no readable image in it") for name in sorted(there - set(known))]
    labels = np.array([known.index(name) for _, name, _ in kept], np.int64)
    return Found([path for path, _, _ in kept], labels, [facts for _, _, facts in kept], known, unused)


def _reject_mixed(folder: Path, below: dict[str, set[Path]]) -> None:
    """Reject class folders that contain parts, or sub-folders of the same names, since these may be the classes.

    One name alone may repeat (CLASS/images), unless it denotes a part. `below` gives the sub-folders by class folder.
    """
    for name, inner in below.items():
        parts = {part_of(path) for path in inner} - {None}
        shared = next(
            (inner & others for other, others in below.items() if other != name and len(inner & others) > 1), set()
        )
        repeated = parts and any(inner & others for other, others in below.items() if other != name)
        if shared or repeated or ("train" in parts and len(parts) > 1):
            held = _listed(sorted(map(str, shared or inner)))
            raise UserError(
                f"the folder {name} of {folder} holds parts, or the same sub-folders as another class ({held}), so the "
                f"classes are ambiguous. Point --raw at {folder / name}, move parts above the classes (train/{name}), "
                "or put the images of each class directly into its folder"
            )


def _listed(names: Sequence[str]) -> str:
    more = f", {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def image_facts(path: Path | BinaryIO, tally: Tally, where: str) -> ImageFacts | None:
    """Return the facts about a readable image; count an unreadable one and return None."""
    problem = ""
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
    parts = [look(trained, None, tally)]
    names = parts[0].names
    if tested := folders["test"] or folders["valid"]:
        parts.append(look([_entered(folder, tally, names) for folder in tested], names, tally))
    form = common_form(raw, [part.facts for part in parts], options, tally)
    train, test = parts[0], parts[1] if tested else None
    groups = _sub_folders_of_classes(train.paths, trained)
    if options.split == "folders" and groups is None and test is None:
        raise UserError(
            f"--split folders needs every image in one of several folders below its class. {raw} has none. Choose rows."
        )
    if len(names) == 1:
        tally.note(f"all images are of one class ({names[0]}); --raw must name the folder that holds the class folders")
    unused += [entry for part in parts for entry in part.unused]
    data = data_set.images(
        tally,
        names,
        (reader_of(train.paths, form), train.labels),
        _test_part(test, form),
        notes=tuple(tally.notes),
        groups=groups,
        understood=Understood(target="name of the class folder", unused=tuple(unused)),
    )
    return hold_out_test(measured(data, at_most=STATISTICS_ROWS), options.split, tally)


def _test_part(found: Found | None, form: ImageForm) -> tuple[NDArray[np.uint8], Ints]:
    """Decode a test part into a temporary file; return its images and labels, none if there is none."""
    paths, labels = ([], np.zeros(0, np.int64)) if found is None else (found.paths, found.labels)
    return stored(reader_of(paths, form), np.arange(len(paths)), form.shape, np.uint8), labels


def _sub_folders_of_classes(paths: list[Path], folders: list[Path]) -> Ints | None:
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
    others, inner = parts.pop(""), [path for found in parts.values() for path in found]
    if not inner or (others and not any(sub_folders(path) and not direct_images(path) for path in parts["train"])):
        return {"train": [folder], "test": [], "valid": []}, []
    unused = [(path.name, "its name means no part") for path in others]
    bare = [path for path in inner if path not in parts["train"] and not sub_folders(path)]
    if len(bare) < len(parts["test"] + parts["valid"]):  # an unlabeled test part beside a labeled one
        parts = {part: [path for path in found if path not in bare] for part, found in parts.items()}
        unused += [(path.name, "no class folders in it") for path in bare]
        bare = []
    named = ", ".join(path.name for path in inner)
    problem = ""
    if not any(map(sub_folders, inner)) or bare:
        problem = "without class folders. Put the images of each class in a folder (train/CLASS)"
    elif not parts["train"]:
        problem = "and no training part. Name a folder train"
    elif others and not parts["test"] + parts["valid"]:
        problem = f"and {others[0].name}, which is no part. Name that folder test"
    if problem:
        raise UserError(
            f"{folder} has parts ({named}) {problem}, point --raw at a folder of class folders, or give classes names "
            "without the words train, test and val"
        )
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


def common_form(where: Path, parts: list[list[ImageFacts]], options: ReadOptions, tally: Tally) -> ImageForm:
    """Return the form that all images share or are resized to.

    16-bit grey is scaled by the bits that the training part, `parts[0]`, uses.
    """
    found = [facts for part in parts for facts in part]
    for remark, count in Counter(remark for facts in found for remark in facts.remarks).items():
        tally.note(f"{count:,} images {remark}")
    deepest = max(facts.deepest for facts in parts[0])
    bits = max(8, deepest.bit_length()) if deepest else 16
    if bits < 16:
        tally.note(f"gray images of 16 bits use {bits} bits; the values 0 to {2**bits - 1:,} are scaled to 0 to 255")
    if brighter := sum(facts.deepest >= 2**bits for facts in found):
        tally.note(f"{brighter:,} images of the test part have larger values, which become 255")
    sizes = Counter(facts.size for facts in found)
    (width, height), _ = sizes.most_common(1)[0]
    if options.image_size is None and len(sizes) > 1:
        listed = ", ".join(f"{count:,} of {w} x {h}" for (w, h), count in sizes.most_common(SHOWN))
        more = f", {len(sizes) - SHOWN} more sizes" if len(sizes) > SHOWN else ""
        raise UserError(
            f"{where} holds images of {len(sizes)} sizes ({listed}{more}); resize all, e.g. with --image-size "
            f"{width}x{height}"
        )
    width, height = options.image_size or (width, height)
    grey = all(facts.grey for facts in found)
    return ImageForm(1 if grey else 3, height, width, options.image_size is not None, 2**bits - 1)


def read_cinic10(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read CINIC-10 from train/ and test/, without valid/; features (3, 32, 32) uint8."""
    folder = folder_of(raw)
    below = sorted(path for path in folder.rglob("*") if path.is_dir() and path.name != "train")
    root = next((path for path in (folder, *below) if (path / "train").is_dir() and (path / "test").is_dir()), None)
    if root is None:
        raise UserError(f"no train/ and test/ below {folder}; --raw must hold {data_set.files}")
    form, parts = ImageForm(3, 32, 32), [look([root / name], CLASSES, tally) for name in ("train", "test")]
    for path, facts in ((path, facts) for part in parts for path, facts in zip(part.paths, part.facts, strict=True)):
        if facts.size != (32, 32):
            raise UserError(f"{path} has {facts.size[0]} x {facts.size[1]} pixels instead of 32 x 32; fetch it again")
    train = reader_of(parts[0].paths, form), parts[0].labels
    statistics = {"mean": (0.4789, 0.4723, 0.4305), "std": (0.2421, 0.2383, 0.2587)}
    return data_set.images(tally, CLASSES, train, _test_part(parts[1], form), **statistics)
