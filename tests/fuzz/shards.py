"""Folders of shards: written by the real writer, then damaged in their bytes, their datasets or their manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hypothesis import strategies as st

from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.apportionment import offsets_of
from fedmpi.data.opening import open_store
from fedmpi.data.schema import CLASS_COUNTS, CLIENT_IDS, FEATURES, LABELS, MANIFEST, OFFSETS
from fedmpi.data.shards import ShardStore
from fedmpi.describe.data import inspect_store
from tests.fuzz.damage import DAMAGE, REFUSED, WHERE, Finding, damage, folder_of, outcome

Case = tuple[str, str, Any]
CLASSES, SIZES = 3, [3, 1, 7, 0, 5]
FILES = ("train-00000.h5", "train-00001.h5", "test.h5", "val.h5")
DATASETS = (FEATURES, LABELS, OFFSETS, CLIENT_IDS, CLASS_COUNTS)
JUNK: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e300, 0.5, "", "3", "../x", "/etc/passwd", "a\0b", "\n"]
JUNK += ["digits", "test.h5", ".", [], [1], {}, {"a": 1}, [[]], "float32", "text", "x" * 3000]
NUMBERS = [-(2**63), -100, -1, 2, 3, 4, 255, 2**31 - 1, 2**63 - 1, np.nan, np.inf, 3.7]
Arrays = dict[str, np.ndarray]


def made(dtype: str) -> RawDataset:
    """Vectors of 6 values, or token ids of a vocabulary of 9."""
    rows = sum(SIZES) + 8
    values = np.arange(rows * 6).reshape(rows, 6)
    x = (values % 9).astype(np.int32) if dtype == "int32" else values.astype(dtype)
    labels = np.arange(rows) % CLASSES
    return RawDataset(
        name="small",
        task="text" if dtype == "int32" else "vector",
        classes=CLASSES,
        class_names=("a", "b", "c"),
        feature_shape=(6,),
        dtype=dtype,  # type: ignore[arg-type]
        mean=() if dtype == "int32" else (0.5,),
        std=() if dtype == "int32" else (2.0,),
        labels=labels,
        users=None,
        user_names=None,
        read=lambda wanted: x[wanted],
        test_x=x[:9],
        test_y=labels[:9],
        skipped=0,
        licence="none",
        citation="none",
        vocabulary=tuple("abcdefghi") if dtype == "int32" else (),
    )


@cache
def original(dtype: str) -> Path:
    """An undamaged folder."""
    folder = folder_of(f"shards-{dtype}")[0] / "shards"
    sizes = np.array(SIZES)
    write_shards(made(dtype), Partition(np.arange(sizes.sum()), offsets_of(sizes), "given", {}), folder, 2, 0, "", 0.2)
    return folder


def strategy() -> st.SearchStrategy[Case]:
    """(dtype of the features, what is done to the folder, with what)."""
    files = st.sampled_from(FILES)
    ways = st.one_of(
        st.tuples(st.just("file"), st.tuples(st.sampled_from((*FILES, MANIFEST)), DAMAGE)),
        st.tuples(st.just("head"), st.tuples(files, st.integers(0, 2047), st.integers(0, 255))),
        st.tuples(st.just("shorter"), st.tuples(files, WHERE)),
        st.tuples(st.just("dataset"), st.tuples(files, st.sampled_from(DATASETS), st.sampled_from(sorted(REPLACED)))),
        st.tuples(st.just("value"), st.tuples(files, st.sampled_from(DATASETS), WHERE, st.sampled_from(NUMBERS))),
        st.tuples(st.just("manifest"), st.lists(st.tuples(WHERE, st.sampled_from(JUNK)), min_size=1, max_size=2)),
        st.tuples(st.just("drop"), WHERE),
    )
    return st.tuples(st.sampled_from(["uint8", "float32", "int32"]), ways).map(lambda drawn: (drawn[0], *drawn[1]))


def attempt(case: Case) -> str:
    """Reject a folder, or read it as it was written; whatever passes the checksums is what was written."""
    dtype, what, how = case
    folder = original(dtype).with_name("damaged")
    copy(dtype, folder)
    try:
        globals()[f"_{what}"](folder, how)
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return "cannot be made"  # such a value has no place in such a dataset
    plain = outcome(lambda: _read(open_store(folder)))
    verified = outcome(lambda: _read(open_store(folder, verify=True)))
    detectable = what not in ("manifest", "drop") and how[0] != MANIFEST  # with which all else is compared
    if detectable and not isinstance(verified, str) and (difference := _difference(verified, _expected(dtype))):
        raise Finding(f"the checksums agree, but {difference} differs")
    if isinstance(plain, str):
        return REFUSED
    if plain["sizes"].sum() != len(plain["y"]):
        raise Finding("clients' sizes and labels differ")
    return "read" if isinstance(verified, str) else "unharmed"


def copy(dtype: str, folder: Path) -> None:
    """Put an undamaged folder instead of any files there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original(dtype), folder)


@cache
def _expected(dtype: str) -> Arrays:
    return _read(open_store(original(dtype)))


def _difference(one: Arrays, other: Arrays) -> str:
    for name in other:
        if one[name].dtype != other[name].dtype or not np.array_equal(one[name], other[name]):
            return name
    return ""


def _read(store: ShardStore) -> Arrays:
    """Everything that a run could read."""
    inspect_store(store).lines()
    clients = [store.client(k) for k in range(store.clients)]
    test, held = store.test(), store.validation()
    part = held or (np.empty(0), np.empty(0))
    found = {
        "sizes": store.sizes,
        "x": np.concatenate([x for x, _ in clients]),
        "y": np.concatenate([y for _, y in clients]),
        "counts": store.class_counts(),
        "test x": np.array(test[0]),
        "test y": np.array(test[1]),
        "val x": np.array(part[0]),
        "val y": np.array(part[1]),
        "held": store.validation_offsets if store.validation_offsets is not None else np.empty(0),
        "names": store.client_ids,
        "words": np.array(store.vocabulary),
        "extras": np.array(sorted(store.extras)),
    }
    shape = store.description.feature_shape
    for name in ("y", "test y", "val y"):
        if found[name].size and not 0 <= found[name].min() <= found[name].max() < store.description.classes:
            raise Finding(f"a label of {name} is none of the classes")
    if found["x"].shape[1:] != shape or found["test x"].shape[1:] != shape:
        raise Finding("a sample has another shape than the manifest says")
    return found


def _file(folder: Path, how: Any) -> None:
    name, (what, where, with_what) = how
    damage(folder / name, what, where, with_what)
    if what == "kind" and with_what in ("fifo", "link to a device") and name != MANIFEST:
        _state_size(folder, name)


def _head(folder: Path, how: Any) -> None:
    name, place, value = how
    content = bytearray((folder / name).read_bytes())
    content[place % len(content)] = value
    (folder / name).write_bytes(content)


def _shorter(folder: Path, how: Any) -> None:
    """The file ends early, and the manifest says so."""
    name, where = how
    damage(folder / name, "cut", where, 0)
    _state_size(folder, name)


def _state_size(folder: Path, name: str) -> None:
    """Let the manifest state the size that the file has."""
    table = json.loads((folder / MANIFEST).read_text())
    for file in [*table["train"], table["test"], table["val"]]:
        if file is not None and file["name"] == name:
            file["bytes"] = (folder / name).stat().st_size
    (folder / MANIFEST).write_text(json.dumps(table))


def _dataset(folder: Path, how: Any) -> None:
    name, dataset, kind = how
    with h5py.File(folder / name, "r+") as h5:
        values = h5[dataset][...]
        del h5[dataset]
        REPLACED[kind](h5, dataset, values)
    _state_size(folder, name)


def _set(convert: Callable[[np.ndarray], Any]) -> Callable[..., None]:
    return lambda h5, name, values: h5.__setitem__(name, convert(values))


def _virtual(h5: h5py.File, name: str, values: np.ndarray) -> None:
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    layout[...] = h5py.VirtualSource("test.h5", FEATURES, values.shape)
    h5.create_virtual_dataset(name, layout)


def _external(h5: h5py.File, name: str, values: np.ndarray) -> None:
    raw = Path(h5.filename).with_name("raw.bin")
    values.tofile(raw)
    h5.create_dataset(name, values.shape, values.dtype, external=[(str(raw), 0, values.nbytes)])


def _compact(h5: h5py.File, name: str, values: np.ndarray) -> None:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(values.shape)
    held = h5py.h5d.create(h5.id, name.encode(), h5py.h5t.py_create(values.dtype), space, creation)
    h5py.Dataset(held)[...] = values


REPLACED: dict[str, Callable[..., Any]] = {
    "external link": _set(lambda values: h5py.ExternalLink("test.h5", f"/{FEATURES}")),
    "dangling link": _set(lambda values: h5py.SoftLink("/nowhere")),
    "external storage": _external,
    "virtual": _virtual,
    "chunked": lambda h5, name, values: h5.create_dataset(name, data=values, chunks=True),
    "compact": _compact,
    "group": lambda h5, name, values: h5.create_group(name),
    "float": _set(lambda values: values.astype(np.float64) + 0.7),
    "int64": _set(lambda values: values.astype(np.int64)),
    "big-endian": _set(lambda values: values.astype(values.dtype.newbyteorder(">"))),
    "object": lambda h5, name, values: h5.create_dataset(name, values.shape, h5py.string_dtype()),
    "bool": _set(lambda values: values.astype(bool)),
    "compound": _set(lambda values: np.zeros(values.shape, [("a", values.dtype)])),
    "scalar": _set(lambda values: 3),
    "empty": _set(lambda values: h5py.Empty(values.dtype)),
    "gone": lambda h5, name, values: None,
}


def _value(folder: Path, how: Any) -> None:
    name, dataset, where, value = how
    with h5py.File(folder / name, "r+") as h5:
        held = h5[dataset]
        place = np.unravel_index(int(where * held.size), held.shape)
        with np.errstate(invalid="ignore"):
            held[place] = np.array(value).astype(held.dtype)


def _manifest(folder: Path, how: Any) -> None:
    """Junk at places of the manifest."""
    table = json.loads((folder / MANIFEST).read_text())
    for where, value in how:
        places = list(_places(table))
        held, key = places[int(where * len(places))]
        held[key] = value
    (folder / MANIFEST).write_text(json.dumps(table))


def _drop(folder: Path, where: float) -> None:
    table = json.loads((folder / MANIFEST).read_text())
    places = list(_places(table))
    held, key = places[int(where * len(places))]
    del held[key]
    (folder / MANIFEST).write_text(json.dumps(table))


def _places(table: Any) -> Any:
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        yield table, key
        yield from _places(value)
