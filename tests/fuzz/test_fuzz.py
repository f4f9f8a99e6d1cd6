"""Damaged and odd files are rejected in a sentence or used rightly; FUZZ_EXAMPLES=3000 tries more of each kind."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpi import ClientArrays, UserError
from fedmpi.common.errors import LONGEST_SENTENCE
from fedmpi.config import config_toml, load_config
from fedmpi.config.loading import build_config
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST
from fedmpi.data.shards import ShardStore
from fedmpi.describe.data import store_facts

Result = TypeVar("Result")
REFUSED = "refused"
WHERE = st.floats(0, 1, exclude_max=True)
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), WHERE, st.integers(0, 7)),
    st.tuples(st.just("cut"), WHERE, st.just(0)),
    st.tuples(st.just("write"), WHERE, st.binary(min_size=1, max_size=12)),
    st.tuples(st.just("gone"), WHERE, st.just(0)),
)
"""Kind of damage to a file, its position, and its bytes."""
JUNK = [None, True, -1, 0, 2**63, 1e300, 0.5, "", "3", "../x", "a\0b", "test.h5", [], [1], {}, "x" * 3000]
FILES = ("train-00000.h5", "train-00001.h5", "test.h5", "val.h5")
SIZES = np.array([3, 1, 7, 0, 5])
FOLDER = Path(mkdtemp(prefix="fedmpi-fuzz-"))


def outcome(use: Callable[[], Result]) -> Result | str:
    """Return the result of an input, or `REFUSED` if it was rejected in one sentence."""
    try:
        return use()
    except UserError as error:
        assert "\n" not in str(error) and 20 <= len(str(error)) <= LONGEST_SENTENCE + 3, f"no sentence: {error}"
        return REFUSED


def tried(strategy: st.SearchStrategy[Any], examples: int) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Return a decorator that calls a test with cases of a strategy."""
    wanted = os.environ.get("FUZZ_EXAMPLES")
    known = {"max_examples": int(wanted or examples), "deadline": None, "database": None}
    quiet = settings(**known, derandomize=wanted is None, suppress_health_check=list(HealthCheck))
    return lambda test: quiet(given(strategy)(test))


def damage(path: Path, what: str, where: float, how: Any) -> None:
    """Flip a bit, cut the file, overwrite bytes, or remove it."""
    content = bytearray(path.read_bytes())
    place = int(where * len(content))
    if what == "gone":
        path.unlink()
        return
    if what == "flip" and content:
        content[place] ^= 1 << how
    elif what == "cut":
        del content[place:]
    elif what == "write":
        content[place : place + len(how)] = how
    path.write_bytes(content)


# Shards


@cache
def written() -> tuple[Path, dict[str, Any]]:
    """An undamaged folder, and what is in it."""
    count, clients = int(SIZES.sum()), np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = np.arange(count * 6, dtype=np.float32).reshape(count, 6), np.arange(count) % 3
    held = slice(0, 3)
    arrays = ClientArrays(
        x, y, clients, test=(x[:9], y[:9]), val=(x[held], y[held], clients[held]), clients=len(SIZES), mean=0.5, std=2.0
    )
    arrays.save(FOLDER / "shards", shards=2)
    return FOLDER / "shards", read(open_store(FOLDER / "shards"))


def read(store: ShardStore) -> dict[str, Any]:
    """Everything that a run could read; labels and shapes are those of the manifest."""
    store_facts(store)
    clients = [store.client(k) for k in range(store.clients)]
    found = {"x": np.concatenate([x for x, _ in clients]), "y": np.concatenate([y for _, y in clients])}
    found |= {"sizes": store.sizes, "counts": store.class_counts()}
    for name, part in (("test", store.test()), ("val", store.validation() or (np.empty(0), np.empty(0)))):
        found |= {f"{name} x": np.array(part[0]), f"{name} y": np.array(part[1])}
    for name in ("y", "test y", "val y"):
        assert not found[name].size or 0 <= found[name].min() <= found[name].max() < store.description.classes
    assert found["x"].shape[1:] == store.description.feature_shape and store.sizes.sum() == len(found["y"])
    return found


def places(table: Any) -> Any:
    """Yield the dictionaries and lists of a manifest with each of their keys."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ():
        yield table, key
        yield from places(value)


CHANGES = st.one_of(
    st.tuples(st.just("file"), st.sampled_from((*FILES, MANIFEST)), DAMAGE),
    st.tuples(st.just("manifest"), WHERE, st.sampled_from([*JUNK, REFUSED])),
)  # fmt: skip


@tried(CHANGES, 120)
def test_a_folder_is_rejected_or_read_as_it_was_written(case: Any) -> None:
    original, expected = written()
    what, name, how = case
    folder = FOLDER / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    if what == "file":
        damage(folder / name, *how)
    else:
        table = json.loads((folder / MANIFEST).read_text())
        held, key = list(places(table))[int(name * len(list(places(table))))]
        held[key] = how
        if how == REFUSED:
            del held[key]
        (folder / MANIFEST).write_text(json.dumps(table))
    outcome(lambda: read(open_store(folder)))
    verified = outcome(lambda: read(open_store(folder, verify=True)))
    if what != "manifest" and name != MANIFEST and not isinstance(verified, str):
        for key, values in expected.items():
            np.testing.assert_array_equal(verified[key], values)


# Configurations

TOMLS = [
    b"\xef\xbb\xbfrounds = 3",
    b"rounds = " + b"9" * 4301,
    b"seed = nan",
    b"a = " + b"[" * 10_000,
    b"[local]\nlr = 0.2\nlr = 0.2",
    b"local = 5",
    b"'local.lr' = 1",
    b"preset = []",
    b"rounds = 3.0",
    b"[clients]\ncount = 1_000_000_000_000_000_000_000",
]


@pytest.mark.parametrize("content", TOMLS, ids=lambda content: str(content[:20]))
def test_odd_texts_are_no_configuration_or_a_whole_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    found = outcome(lambda: load_config(tmp_path / "c.toml"))
    assert isinstance(found, str) or build_config([("again", tomllib.loads(config_toml(found)))]) == found
