"""The idx format of MNIST and EMNIST: a big-endian header, then unsigned bytes; plain or gzipped."""

from __future__ import annotations

import math
import struct
import zlib
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.raw_files import BLOCK, Scratch, open_bytes
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an idx file of unsigned bytes, memory-mapped.

    A plain file is mapped where it lies; a gzipped one is unzipped block by block into an unnamed temporary file.
    """
    with open_bytes(path) as stream:
        try:
            shape = _header(stream, path, dimensions)
            if isinstance(stream, GzipFile):
                return _unzipped(stream, path, shape)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    offset = 4 + 4 * dimensions
    _check_size(path, path.stat().st_size - offset, shape)
    return np.memmap(path, np.uint8, "r", offset, shape) if all(shape) else np.empty(shape, np.uint8)


def _header(stream: GzipFile | BufferedReader, path: Path, dimensions: int) -> tuple[int, ...]:
    head = stream.read(4 + 4 * dimensions)
    magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if len(head) < 4 + 4 * dimensions or head[:4] != magic:
        raise UserError(
            f"{path} is not an idx file of unsigned bytes in {dimensions} dimension(s): it begins with "
            f"{head[:4].hex() or 'nothing'} instead of {magic.hex()}; fetch it again"
        )
    return struct.unpack(f">{dimensions}I", head[4:])


def _unzipped(stream: GzipFile | BufferedReader, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    scratch = Scratch((), np.uint8)
    while scratch.length <= math.prod(shape) and (block := stream.read(BLOCK)):
        scratch.append(np.frombuffer(block, np.uint8))
    _check_size(path, scratch.length, shape)
    return scratch.rows().reshape(shape)


def _check_size(path: Path, found: int, shape: tuple[int, ...]) -> None:
    expected = math.prod(shape)
    if found != expected:
        more = " or more" if found > expected else ""
        raise UserError(
            f"{path} holds {found} bytes of data{more} where its header says {expected} "
            f"({' x '.join(map(str, shape))}); fetch it again"
        )


def read_pair(images: Path, labels: Path, classes: int) -> tuple[NDArray[np.uint8], Ints]:
    """Images (n, height, width) uint8 and labels (n,) int64 of two idx files that belong together."""
    x = read_idx(images, 3)
    y = np.asarray(read_idx(labels, 1), np.int64)
    if len(x) != len(y):
        raise UserError(
            f"{images} holds {len(x)} images but {labels} holds {len(y)} labels; they do not belong together"
        )
    if not x.size:
        raise UserError(f"{images} holds no images ({' x '.join(map(str, x.shape))}); fetch it again")
    wrong = np.flatnonzero(y >= classes)
    if len(wrong):
        raise UserError(
            f"{labels}, record {wrong[0]}: label {y[wrong[0]]} is not one of the {classes} classes; fetch it again"
        )
    return x, y


def patterns(stem: str) -> tuple[str, ...]:
    """File names under which an idx file is found: plain first, with the dash or the dot that some mirrors use."""
    dotted = stem.replace("-idx", ".idx")
    return stem, dotted, f"{stem}.gz", f"{dotted}.gz"
