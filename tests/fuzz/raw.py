"""Raw data: files of every reader, right at first, then damaged, exaggerated or of another kind."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from data_prep.datasets import DATASETS
from data_prep.partitions import partition
from data_prep.raw import ReadOptions, Tally
from data_prep.writer import write_shards
from fedmpi.data.opening import open_store
from tests.data_prep import layouts
from tests.fuzz.damage import DAMAGE, WHERE, Finding, damage, folder_of, outcome

Case = tuple[str, Any]
Made = tuple[str, Path, ReadOptions]
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
    """(what is written, with what)."""
    arrays = st.tuples(st.sampled_from(["x", "y", "user", "x_test", "y_test"]), st.sampled_from(sorted(ODD_ARRAYS)))
    tasks = st.sampled_from([None, "text", "vector", "image"])
    cells = st.lists(st.tuples(st.integers(1, ROWS) | st.none(), st.integers(0, 3), st.sampled_from(ODD_CELLS)))
    sizes = st.integers(0, 2**31)
    return st.one_of(
        st.tuples(st.just("damaged"), st.tuples(st.sampled_from(sorted(layouts.FILES)), WHERE, DAMAGE)),
        st.tuples(st.just("arrays"), st.tuples(st.lists(arrays, min_size=1, max_size=3), tasks)),
        st.tuples(st.just("header"), st.sampled_from(HEADERS)),
        st.tuples(st.just("bomb"), st.integers(0, 1)),
        st.tuples(st.just("table"), st.tuples(cells, st.sampled_from(["\n", "\r", "\r\n", "\n\n", "", "\x0b"]))),
        st.tuples(st.just("png"), st.tuples(sizes, sizes)),
    )


def attempt(case: Case) -> str:
    """Reject the input, or read, partition and write it as shards that pass their checks."""
    what, how = case
    folder = folder_of("raw")[0] / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name, raw, options = globals()[f"_{what}"](folder, how)
    return outcome(lambda: _prepared(name, raw, options, folder / "shards"))


def _prepared(name: str, raw: Path, options: ReadOptions, out: Path) -> str:
    data = DATASETS[name].read(raw, options, Tally())
    parts = partition("iid", data.labels, data.classes, 2, np.random.default_rng(0), data.users, data.class_names)
    write_shards(data, parts, out, 1, 0, "")
    store = open_store(out, verify=True)
    if store.samples != len(parts.rows) or store.part_samples("test") != len(data.test_y):
        raise Finding("the shards hold another number of samples")
    return "read"


def _damaged(folder: Path, how: Any) -> Made:
    name, where, damaged = how
    raw = layouts.raw_of(name, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    damage(files[int(where * len(files))], *damaged)
    return name, raw, ReadOptions()


def _arrays(folder: Path, how: Any) -> Made:
    arrays, task = how
    x = np.arange(ROWS * 3).reshape(ROWS, 3).astype(np.float32)
    np.savez(
        folder / "a.npz", **{"x": x, "y": np.arange(ROWS) % 3, **{name: ODD_ARRAYS[kind] for name, kind in arrays}}
    )
    return "arrays", folder / "a.npz", ReadOptions(task=task)


def _header(folder: Path, header: bytes) -> Made:
    """An .npy member whose header says something else than what follows."""
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(240)
    return _members(folder, content, content)


def _bomb(folder: Path, power: int) -> Made:
    """Zeros that are a thousand times shorter when packed, behind a header that promises little."""
    small = io.BytesIO()
    np.save(small, np.zeros((ROWS, 3), np.float32))
    return _members(folder, small.getvalue() + bytes(10**power * 1_000_000), small.getvalue())


def _members(folder: Path, x: bytes, y: bytes) -> Made:
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", y)
    return "arrays", folder / "a.npz", ReadOptions()


def _table(folder: Path, how: Any) -> Made:
    """Odd cells, each in one row or in all, and odd ends of lines."""
    cells, end = how
    rows = [["a", "b", "label", "user"], *([str(i), str(i / 2), str(i % 3), f"u{i % 4}"] for i in range(ROWS))]
    for row, column, cell in cells:
        for changed in rows[1:] if row is None else [rows[row]]:
            changed[column] = cell
    text = end.join(map(",".join, rows)) + end
    (folder / "a.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    return "arrays", folder / "a.csv", ReadOptions()


def _png(folder: Path, size: tuple[int, int]) -> Made:
    """A PNG whose header claims another size, with the right checksum."""
    raw = layouts.raw_of("imagefolder", folder)
    path = min(folder.rglob("*.png"))
    content = path.read_bytes()
    head = b"IHDR" + struct.pack(">II", *size) + content[24:29]
    path.write_bytes(content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:])
    return "imagefolder", raw, ReadOptions()
