"""Parquet files and readers of one's own, with odd values in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from data_prep.datasets import DATASETS, read_own
from data_prep.partitions import partition
from data_prep.raw import RawDataset, ReadOptions, Tally
from data_prep.writer import write_shards
from fedmpi.common.registry import resolve
from fedmpi.data.opening import open_store
from tests.fuzz.parts import RETURNS
from tests.fuzz.verdict import Finding, outcome

Case = tuple[str, Any, dict[str, Any]]
ROWS = 20
COLUMNS: dict[str, Callable[[], list[Any]]] = {
    "none": lambda: [None] * ROWS,
    "some none": lambda: [None, 1] * (ROWS // 2),
    "lists": lambda: [list(range(row % 4)) for row in range(ROWS)],
    "lists of none": lambda: [[None]] * ROWS,
    "lists of lists": lambda: [[[1], [2, 3]]] * ROWS,
    "float lists": lambda: [[0.5, float("nan")]] * ROWS,
    "flags": lambda: [[True, False]] * ROWS,
    "negative lists": lambda: [[-100, -1, -7]] * ROWS,
    "huge lists": lambda: [[2**62, 1]] * ROWS,
    "empty lists": lambda: [[1][1:]] * ROWS,
    "texts": lambda: ["", "word", "\0", "../a.png", "/dev/zero"] * (ROWS // 5),
    "bytes": lambda: [b"", b"\x89PNG", b"GIF89a"] * (ROWS // 3) + [b""] * (ROWS % 3),
    "images": lambda: [{"bytes": None, "path": "0.png"}, {"bytes": b"x", "path": None}] * (ROWS // 2),
    "maps": lambda: [{"a": 1}] * ROWS,
    "infinite": lambda: [float("inf"), -1e300] * (ROWS // 2),
    "whole": lambda: [2**62, -(2**62)] * (ROWS // 2),
    "zeros": lambda: [0, 1] * (ROWS // 2),
    "truth": lambda: [True, False] * (ROWS // 2),
}


def strategy() -> st.SearchStrategy[Case]:
    """(data set, what is put where into its files, options of reading)."""
    sizes = {"length": st.integers(1, 40), "vocabulary": st.integers(1, 30)}
    own = st.tuples(st.just("own"), st.tuples(st.sampled_from(sorted(OWN)), st.sampled_from(sorted(RETURNS))))
    kinds = [own]
    column = st.tuples(
        st.sampled_from(["x", "y", "label", "user", "t", "ids", "image"]), st.sampled_from(sorted(COLUMNS))
    )
    if find_spec("pyarrow") is not None:
        kinds.append(st.tuples(st.just("parquet"), st.lists(column, max_size=3)))
    given_options = {
        "task": st.sampled_from(["text", "vector", "image"]),
        "targets": st.sampled_from(["classification", "tokens", "multilabel", "regression"]),
        "label": st.sampled_from(["label", "x,y", "ids", "y", "t", "x,x", "gone"]),
        "user": st.sampled_from(["user", "x", "gone"]),
        "split": st.sampled_from(["users", "user", "x", "gone"]),
        "features": st.sampled_from([("x", "y"), ("t",), ("ids",), ("image",), ("label",), ("gone",), ("x", "t")]),
        "image_size": st.sampled_from([(3, 3), (1, 9)]),
        "skip_unlabelled": st.just(True),
        "numbers_are_classes": st.just(True),
        "skip_odd_sizes": st.just(True),
    }
    options = st.fixed_dictionaries({}, optional={**sizes, **given_options})
    return st.tuples(st.one_of(*kinds), options).map(lambda drawn: (*drawn[0], drawn[1]))


def attempt(case: Case) -> str:
    """Refused, or read, partitioned and written with a validation part as shards that pass their checks."""
    name, how, given_options = case
    folder = Path(gettempdir()) / f"fedmpi-fuzz-readers-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "raw").mkdir(parents=True)
    try:
        if name == "own":
            part = resolve("data set", _reader(*how))
            known = {key: value for key, value in given_options.items() if key in OWN_OPTIONS}
            return outcome(
                lambda: _written(read_own(part, {}, folder, ReadOptions(**known), Tally()), folder / "out"),
                failures=True,
            )
        _parquet(folder / "raw")
        _columns(folder / "raw", how)
        data = DATASETS[name]
        given = {key: value for key, value in given_options.items() if key in data.options}
        return outcome(lambda: _written(data.read(folder / "raw", ReadOptions(**given), Tally()), folder / "out"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _written(data: RawDataset, out: Path) -> str:
    draws = np.random.default_rng(0)
    parts = partition("iid", data.labels, data.label_classes, 2, draws, data.users, data.class_names)
    write_shards(data, parts, out, 1, 0, "", 0.3)
    store = open_store(out, verify=True)
    if store.samples + store.part_samples("val") != len(data.labels) or store.part_samples("test") != len(data.test_y):
        raise Finding("the shards hold another number of samples")
    return "read"


def _parquet(folder: Path) -> None:
    for row in range(2):
        Image.new("L", (4, 3 + row), row).save(folder / f"{row}.png")


def _columns(folder: Path, how: list[tuple[str, str]]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "x": np.arange(ROWS) / 3,
        "y": np.arange(ROWS) % 2,
        "user": [f"u{k % 4}" for k in range(ROWS)],
    }
    columns |= {"t": [f"{k % 2}.png" for k in range(ROWS)], "ids": [[1, 2, k] for k in range(ROWS)]}
    columns |= {"label": [k % 3 for k in range(ROWS)]} | {name: COLUMNS[kind]() for name, kind in how}
    table = pyarrow.table(columns)
    if len(how) % 2:
        pyarrow.parquet.write_table(table, folder / "t.parquet")
        return
    with pyarrow.ipc.new_stream(str(folder / "t.arrow"), table.schema) as writer:
        writer.write_table(table)


OWN: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "all": lambda wrong: wrong({"x": np.zeros((ROWS, 3), "f4"), "y": np.arange(ROWS) % 3}),
    "x": lambda wrong: {"x": wrong(np.zeros((ROWS, 3), "f4")), "y": np.arange(ROWS) % 3},
    "y": lambda wrong: {"x": np.zeros((ROWS, 3), "f4"), "y": wrong(np.arange(ROWS) % 3)},
    "targets": lambda wrong: {"x": np.zeros((ROWS, 3), "f4"), "y": wrong(np.ones((ROWS, 2)))},
    "user": lambda wrong: {"x": np.zeros((ROWS, 3), "f4"), "y": np.arange(ROWS) % 3, "user": wrong(np.arange(ROWS))},
    "x_test": lambda wrong: {
        "x": np.zeros((9, 3), "f4"),
        "y": np.arange(9),
        "x_test": wrong(np.ones((9, 3))),
        "y_test": np.arange(9),
    },
    "key": lambda wrong: {"x": np.zeros((ROWS, 3), "f4"), "y": np.arange(ROWS), "z": wrong(3)},
}
OWN_OPTIONS = ("task", "targets", "skip_unlabelled", "numbers_are_classes")


def _reader(kind: str, returned: str) -> Callable[[], Any]:
    def reader() -> Any:
        return OWN[kind](RETURNS[returned])

    return reader
