"""Tools for raw files: look-up in a folder, lines of (un)zipped text, rows of CSV files."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedmpi.common.errors import UserError

GZIP = b"\x1f\x8b"
PART_WORDS = {
    "train": ("train", "training", "trainset"),
    "test": ("test", "testing", "testset"),
    "valid": ("validation", "valid", "val", "dev"),
}
"""Words in names of files and folders (in any case) that denote a part of the data."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
TOOLS = {"__macosx", "__pycache__", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found"}
"""Folders that tools create, in lower case."""


def part_of(path: Path) -> str | None:
    """Return the part ("train", "test" or "valid") denoted by a relative path, searching its last component first."""
    words = [word.lower() for name in reversed(path.parts) for word in WORD.findall(name)]
    return next((part for word in words for part, known in PART_WORDS.items() if word in known), None)


def folder_of(raw: Path) -> Path:
    """Return `raw` if it is a folder; reject anything else."""
    if not raw.is_dir():
        raise UserError(f"{raw} is not a folder; --raw takes the folder that holds the data set's files")
    return raw


def is_hidden(name: str) -> bool:
    """Check whether a file or folder of this name is hidden or belongs to a tool, and so contains no samples."""
    return name.startswith(".") or name.lower() in TOOLS


def files_below(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder at any depth that match a pattern (without any: all files), in path order.

    Hidden files and folders of tools are skipped. Linked folders are followed, but no folder is read twice, and none
    that contains `folder`.
    """
    found, seen = [], set(map(os.path.realpath, folder.absolute().parents))
    for root, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        found += [Path(root, name) for name in names if not is_hidden(name)]
    matching = (path for path in found if any(path.match(pattern) for pattern in patterns or ("*",)))
    return sorted(path for path in matching if path.is_file())


def require(raw: Path, patterns: tuple[str, ...], hint: str) -> Path:
    """Return the only file below `raw` that matches a pattern; the first pattern with a match decides."""
    folder = folder_of(raw)
    for pattern in patterns:
        found = files_below(folder, pattern)
        if len(found) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in found[:4])
            raise UserError(f"{folder} holds {len(found)} files named {pattern} ({names}); point --raw at one folder")
        if found:
            return found[0]
    raise UserError(f"no {patterns[0]} in {raw}; --raw must hold {hint}")


def open_bytes(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file, unzipping gzip content whatever the file's name."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file; --raw must lead to files")
    try:
        stream = path.open("rb")
        if stream.peek(2)[:2] != GZIP:
            return stream
        stream.close()
        return gzip.open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror or error}") from error


def lines(path: Path, encoding: str = "utf-8-sig", fallback: str = "") -> Iterator[str]:
    """Yield the lines of a text file, unzipped if it is gzip; lines of another encoding are decoded by `fallback`."""
    try:
        with open_bytes(path) as stream:
            if not fallback:
                yield from io.TextIOWrapper(stream, encoding, newline="\n")
            for line in stream if fallback else ():
                try:
                    yield line.decode(encoding)
                except UnicodeDecodeError:
                    yield line.decode(fallback)
    except LookupError:
        raise UserError(f"--encoding {encoding!r} is unknown. Give one such as latin-1, cp1252 or utf-16.") from None
    except UnicodeError:
        raise UserError(
            f"{path} is not {encoding.removesuffix('-sig').upper()} text. Save it as UTF-8, or give the encoding of a "
            "table, e.g. --encoding cp1252 or --encoding utf-16."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged or cut short ({error}). Fetch it again") from error


def csv_rows(path: Path, content: Iterable[str], delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield last line and fields of each row of a CSV file; a blank line has no fields.

    Python's csv module gives the number of fields of each row, whereas pandas.read_csv silently fills short rows.
    """
    reader = csv.reader(content, delimiter=delimiter, skipinitialspace=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num} is not a CSV row ({error}). Close quotation marks, and end lines with a "
            "line feed."
        ) from error
