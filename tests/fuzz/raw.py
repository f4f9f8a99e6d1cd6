"""Raw data: files of every reader, right at first, then damaged, exaggerated or of another kind."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from data_prep.datasets import DATASETS
from data_prep.partitions import partition
from data_prep.raw import ReadOptions, Tally
from data_prep.writer import write_shards
from fedmpi.data.opening import open_store
from tests.fuzz.damage import DAMAGE, WHERE, Finding, damage, folder_of, outcome

Case = tuple[str, str, Any]
ROWS = 20
ODD_CELLS = ["", " ", "nan", "inf", "-inf", "1e400", "Bob", "a,b", '"', '"open', "\r", "\n", "\0", "é", "1_000", "0x1"]
ODD_CELLS += ["1" * 5000, "x" * 200_000, "2.5", "-7", "True", "\ufeff"]
ODD_ARRAYS: dict[str, Any] = {
    "floats": np.linspace(0, 1, ROWS),
    "texts": np.array(["a", "b"] * (ROWS // 2)),
    "bytes": np.array([b"a", b"\xff"] * (ROWS // 2)),
    "empty texts": np.array([""] * ROWS),
    "objects": np.array([{}, []] * (ROWS // 2), object),
    "bools": np.array([True, False] * (ROWS // 2)),
    "scalar": np.array(3),
    "none": np.empty(0),
    "no columns": np.empty((ROWS, 0)),
    "huge": np.full((ROWS, 3), 1e300),
    "nan": np.full((ROWS, 3), np.nan),
    "ids": np.full((ROWS, 3), 2**31 - 1),
    "complex": np.ones((ROWS, 3), complex),
    "dates": np.full(ROWS, np.datetime64("2020-01-01")),
    "records": np.zeros(ROWS, [("a", "f4")]),
    "unsigned": np.full((ROWS, 3), 2**64 - 1, np.uint64),
    "negative": np.full(ROWS, -3),
    "images": np.zeros((ROWS, 8, 8), np.uint8),
    "five axes": np.zeros((ROWS, 2, 2, 2, 2), np.uint8),
    "fortran": np.asfortranarray(np.arange(ROWS * 3).reshape(ROWS, 3).astype(np.float32)),
    "short": np.zeros((3, 3), np.float32),
    "half": np.ones((ROWS, 3), np.float16),
}
HEADERS = [
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -60)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 9223372036854775807)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': ()}",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (20,)}",
    b"{'descr': '<U0', 'fortran_order': False, 'shape': (20,)}",
    b"{'descr': [('a', '<f4', (1000000000,))], 'fortran_order': False, 'shape': (20,)}",
    b"__import__('os').system('true')",
    b"(" * 5000,
    b"{",
    b"\xff" * 60,
]


def strategy() -> st.SearchStrategy[Case]:
    """(data set, what is done to its files, with what)."""
    arrays = st.tuples(st.sampled_from(["x", "y", "user", "x_test", "y_test"]), st.sampled_from(sorted(ODD_ARRAYS)))
    tasks = st.sampled_from([None, "text", "vector", "image"])
    return st.one_of(
        st.tuples(st.sampled_from(sorted(MAKERS)), st.just("file"), st.tuples(WHERE, DAMAGE)),
        st.tuples(st.just("npz"), st.just("arrays"), st.tuples(st.lists(arrays, min_size=1, max_size=3), tasks)),
        st.tuples(st.just("npz"), st.just("header"), st.sampled_from(HEADERS)),
        st.tuples(st.just("npz"), st.just("bomb"), st.integers(0, 1)),
        st.tuples(st.just("csv"), st.just("cells"), st.lists(st.tuples(WHERE, st.sampled_from(ODD_CELLS)), max_size=4)),
        st.tuples(st.just("csv"), st.just("column"), st.tuples(st.integers(0, 3), st.sampled_from(ODD_CELLS))),
        st.tuples(st.just("csv"), st.just("ends"), st.sampled_from(["\r", "\r\n", "\n\n", "", "\x0b"])),
        st.tuples(st.just("mnist"), st.just("shape"), st.lists(st.integers(0, 2**32 - 1) | st.just(0), max_size=3)),
        st.tuples(st.just("images"), st.just("png"), st.tuples(st.integers(0, 2**31), st.integers(0, 2**31))),
        st.tuples(st.just("images"), st.just("sizes"), st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        st.tuples(st.just("cifar"), st.just("pickle"), st.sampled_from(sorted(PICKLES))),
        st.tuples(st.just("femnist"), st.just("json"), st.tuples(WHERE, st.sampled_from(JSONS))),
    )


class _Call:
    """Pickled as a call of a harmless function, as a hostile file would call a harmful one."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


PICKLES: dict[str, bytes] = {
    "a call": pickle.dumps(_Call(os.getcwd), 2),
    "objects": pickle.dumps({b"data": np.array([{}], object), b"labels": [1]}, 2),
    "another shape": pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}, 2),
    "floats": pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}, 2),
    "labels outside": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 99]}, 2),
    "labels of floats": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1.5, 2]}, 2),
    "a list": pickle.dumps([1, 2], 2),
    "nothing": b"",
    "deep": b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b".",
    "memory": b"\x80\x02r\xff\xff\xff\xff.",
    "a huge text": b"\x80\x02X\xff\xff\xff\x7f.",
    "older": pickle.dumps({"a": 1}, 0),
}
JSONS = [
    "",
    "{",
    "[" * 100_000,
    '{"users": 1}',
    "null",
    '{"user_data": {"a": {"x": [[1]], "y": ["b"]}}, "users": ["a"]}',
]
JSONS += ['{"users": ["a"], "user_data": {"a": 5}}', '{"a": ' + "1" * 6000 + "}", '{"overall": 1e999}', "\udcff", "NaN"]


def attempt(case: Case) -> str:
    """Refused, or read, partitioned and written as shards that pass their checks."""
    reader, what, how = case
    folder = folder_of("raw")[0] / "case"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "raw").mkdir(parents=True)
    name, raw = MAKERS[reader](folder / "raw")
    options = ReadOptions()
    if what == "file":
        files = sorted(path for path in (folder / "raw").rglob("*") if path.is_file())
        damage(files[int(how[0] * len(files))], *how[1])
    else:
        options = globals()[f"_{what}"](folder / "raw", how) or options
    return outcome(lambda: _prepared(name, raw, options, folder / "shards"))


def _prepared(name: str, raw: Path, options: ReadOptions, out: Path) -> str:
    data = DATASETS[name].read(raw, options, Tally())
    parts = partition("iid", data.labels, data.classes, 2, np.random.default_rng(0), data.users, data.class_names)
    write_shards(data, parts, out, 1, 0, "")
    store = open_store(out, verify=True)
    if store.samples != len(parts.rows) or store.part_samples("test") != len(data.test_y):
        raise Finding("the shards hold another number of samples")
    return "read"


def _npz(folder: Path, **more: Any) -> tuple[str, Path]:
    x = np.arange(ROWS * 3).reshape(ROWS, 3).astype(np.float32)
    np.savez(folder / "a.npz", **({"x": x, "y": np.arange(ROWS) % 3} | more))
    return "arrays", folder / "a.npz"


def _csv(folder: Path, **more: Any) -> tuple[str, Path]:
    rows = ["a,b,label,user", *(f"{i},{i / 2},{i % 3},u{i % 4}" for i in range(ROWS))]
    (folder / "a.csv").write_text("\n".join(rows) + "\n")
    return "arrays", folder / "a.csv"


def _idx(path: Path, array: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *(shape or array.shape))
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def _mnist(folder: Path, shape: tuple[int, ...] | None = None) -> tuple[str, Path]:
    _idx(folder / "train-images-idx3-ubyte", np.arange(ROWS * 16).reshape(ROWS, 4, 4) % 251, shape)
    _idx(folder / "train-labels-idx1-ubyte.gz", np.arange(ROWS) % 10)
    _idx(folder / "t10k-images-idx3-ubyte.gz", np.zeros((4, 4, 4)))
    _idx(folder / "t10k-labels-idx1-ubyte", np.arange(4))
    return "mnist", folder


def _images(folder: Path, sizes: list[int] | None = None) -> tuple[str, Path]:
    for number in range(8):
        size = (sizes or [4])[number % len(sizes or [4])]
        part = folder / "ab"[number % 2]
        part.mkdir(exist_ok=True)
        kind = ("png", "jpg", "gif", "bmp")[number // 2]
        Image.new("L", (size, size), number * 20).save(part / f"{number}.{kind}")
    return "imagefolder", folder


def _cifar(folder: Path, train: bytes | None = None) -> tuple[str, Path]:
    batch = {b"data": np.zeros((6, 3072), np.uint8), b"fine_labels": [0, 1, 2, 3, 4, 99]}
    (folder / "train").write_bytes(pickle.dumps(batch, 2) if train is None else train)
    (folder / "test").write_bytes(pickle.dumps(batch, 2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"c{i}" for i in range(100)]}, 2))
    return "cifar100", folder


def _femnist(folder: Path) -> tuple[str, Path]:
    for part in ("train", "test"):
        writers = {f"w{k}": {"x": [[0.0] * 784] * 3, "y": [1, 2, 61]} for k in range(3)}
        (folder / part).mkdir()
        (folder / part / "a.json").write_text(json.dumps({"users": sorted(writers), "user_data": writers}))
    return "femnist", folder


MAKERS: dict[str, Callable[[Path], tuple[str, Path]]] = {
    "npz": _npz,
    "csv": _csv,
    "mnist": _mnist,
    "images": _images,
    "cifar": _cifar,
    "femnist": _femnist,
}


def _arrays(folder: Path, how: Any) -> ReadOptions:
    arrays, task = how
    _npz(folder, **{name: ODD_ARRAYS[kind] for name, kind in arrays})
    return ReadOptions(task=task)


def _header(folder: Path, header: bytes) -> None:
    """An .npy member whose header says something else than what follows."""
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(240)
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", content)


def _bomb(folder: Path, power: int) -> None:
    """Zeros that are a thousand times shorter when packed, behind a header that promises little."""
    small = io.BytesIO()
    np.save(small, np.zeros((ROWS, 3), np.float32))
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", small.getvalue() + bytes(10**power * 1_000_000))
        archive.writestr("y.npy", small.getvalue())


def _cells(folder: Path, how: Any) -> None:
    lines = (folder / "a.csv").read_text().split("\n")
    for where, cell in how:
        row = int(where * len(lines))
        cells = lines[row].split(",")
        cells[int(where * 977) % len(cells)] = cell
        lines[row] = ",".join(cells)
    (folder / "a.csv").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))


def _column(folder: Path, how: Any) -> None:
    column, cell = how
    lines = (folder / "a.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    for row in rows[1:]:
        row[column] = cell
    (folder / "a.csv").write_text("\n".join(map(",".join, rows)))


def _ends(folder: Path, end: str) -> None:
    (folder / "a.csv").write_bytes((folder / "a.csv").read_bytes().replace(b"\n", end.encode()))


def _shape(folder: Path, shape: list[int]) -> None:
    _mnist(folder, tuple((shape + [0, 0, 0])[:3]))


def _png(folder: Path, size: tuple[int, int]) -> None:
    """A PNG whose header claims another size, with the right checksum."""
    path = next(folder.rglob("*.png"))
    content = path.read_bytes()
    head = b"IHDR" + struct.pack(">II", *size) + content[24:29]
    path.write_bytes(content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:])


def _sizes(folder: Path, sizes: list[int]) -> None:
    _images(folder, sizes)


def _pickle(folder: Path, name: str) -> None:
    _cifar(folder, PICKLES[name])


def _json(folder: Path, how: Any) -> None:
    files = sorted(folder.rglob("*.json"))
    files[int(how[0] * len(files))].write_bytes(how[1].encode("utf-8", "surrogateescape"))
