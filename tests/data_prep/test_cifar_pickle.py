"""CIFAR's pickles are read as data: what the official files hold is taken, everything else is refused unbuilt."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.datasets.cifar import load_batch
from data_prep.datasets.cifar_pickle import Refused, read_pickle
from fedmpi import UserError

ROWS = np.random.default_rng(3).integers(0, 256, (4, 3072), np.uint8)
BATCH = {"data": ROWS, "labels": [3, 0, 9, 255], "batch_label": "one of 5", "filenames": ["a.png", "b.png", "c", "d"]}


def text(words: str) -> bytes:
    """SHORT_BINSTRING, as Python 2 wrote it."""
    return b"U" + bytes([len(words)]) + words.encode("latin-1")


def matrix(
    shape: bytes = b"K\x02M\x00\x0c\x86",
    kind: bytes = b"u1",
    values: bytes | None = None,
    order: bytes = b"\x89",
    state: bytes | None = None,
    begin: bytes = b"K\x00\x85",
) -> bytes:
    """The instructions of an array as in the official files, any part of which can be another one."""
    raw = bytes(2 * 3072) if values is None else values
    kind = b"U" + bytes([len(kind)]) + kind
    state = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t" if state is None else state
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + begin + b"U\x01b\x87R"
        b"(K\x01" + shape + b"cnumpy\ndtype\n" + kind + b"K\x00K\x01\x87R" + state + b"b"
        + order + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )  # fmt: skip


def batch(data: bytes) -> bytes:
    return b"\x80\x02}(" + text("data") + data + text("labels") + b"](K\x01K\x02eu."


def read(content: bytes) -> Any:
    return read_pickle(io.BytesIO(content))


def test_what_the_official_files_hold_is_read():
    found = read(batch(matrix(values=bytes(range(256)) * 24)))
    assert found["labels"] == [1, 2]
    assert found["data"].dtype == np.uint8 and found["data"].shape == (2, 3072)
    assert found["data"].tobytes() == bytes(range(256)) * 24


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_python_and_numpy_write_of_such_a_batch_is_read(protocol: int):
    found = read(pickle.dumps(BATCH, protocol=protocol))
    assert np.array_equal(found.pop("data"), ROWS)
    assert found == {key: value for key, value in BATCH.items() if key != "data"}


def test_the_published_files_are_read_as_pickle_reads_them(data_folder: Path):
    path = data_folder / "cifar10" / "cifar-10-batches-py" / "data_batch_1"
    found, expected = load_batch(path), pickle.loads(path.read_bytes(), encoding="latin1")
    assert np.array_equal(found.pop("data"), expected.pop("data"))
    assert found == expected


CRAFTED = {
    "pointers chosen by the file": batch(matrix(kind=b"O8", values=bytes(range(16)))),
    "pointers by the state": batch(matrix(state=b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?t")),
    "fields in the type": batch(matrix(state=b"(K\x03U\x01|NU\x01aNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t")),
    "big values": batch(matrix(kind=b"u2")),
    "texts": batch(matrix(kind=b"S9")),
    "a shape beyond its values": batch(matrix(shape=b"J\xff\xff\xff\x7fM\x00\x0c\x86")),
    "a shape below its values": batch(matrix(shape=b"K\x01M\x00\x0c\x86")),
    "a negative shape": batch(matrix(shape=b"J\xff\xff\xff\xffM\x00\x0c\x86")),
    "two negative lengths": batch(matrix(shape=b"J\xfe\xff\xff\xffJ\x00\xf4\xff\xff\x86")),
    "three dimensions": batch(matrix(shape=b"K\x02M\x00\x0cK\x01\x87")),
    "other columns": batch(matrix(shape=b"M\x00\x0cK\x02\x86")),
    "a length that is no number": batch(matrix(shape=b"U\x012M\x00\x0c\x86")),
    "a length that is a truth": batch(matrix(shape=b"\x88M\x00\x0c\x86", values=bytes(3072))),
    "column by column": batch(matrix(order=b"\x88")),
    "room before the values": batch(matrix(begin=b"J\xff\xff\xff\x7f\x85")),
    "values that are a list": batch(matrix().replace(b"\x89T" + struct.pack("<i", 6144) + bytes(6144), b"\x89]")),
    "an array without values": batch(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"),
    "an array of pointers made at once": batch(
        b"cnumpy\nndarray\nK\x01\x85cnumpy\ndtype\nU\x02O8\x85RC\x08AAAAA\x00\x00\x00\x87R"
    ),
    "another buffer": batch(b"cnumpy.core.numeric\n_frombuffer\n" + b"(U\x01aU\x02u1K\x01\x85U\x01CtR"),
    "a scalar": batch(b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\nU\x02O8K\x00K\x01\x87RU\x08abcdefghtR"),
    "code": batch(b"cos\nsystem\nU\x02ls\x85R"),
    "another codec": batch(b"c_codecs\nencode\nU\x02abU\x05utf-7\x86R"),
    "a type as data": batch(b"cnumpy\nndarray\n"),
    "a call of a text": batch(b"U\x02lsU\x01a\x85R"),
    "a change of a list": batch(b"]}b"),
    "a change of a name": batch(b"cnumpy\ndtype\n}b"),
    "an object": batch(b"cnumpy\nndarray\n)\x81"),
    "a persistent name": batch(b"U\x01aQ"),
    "an extension": batch(b"\x82\x01"),
    "long numbers": batch(b"\x8a\xff" + b"\x7f" * 255),
    "a set": batch(b"\x8f"),
    "a key that is a number": b"\x80\x02}(K\x01K\x02u.",
    "an uneven dictionary": b"\x80\x02}(U\x01au.",
    "too little on the stack": b"\x80\x02\x86.",
    "items of nothing": b"\x80\x02K\x01K\x02s.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "no end": b"\x80\x02}",
    "nothing": b"",
    "words": b"<html>moved</html>",
}


@pytest.mark.parametrize("name", CRAFTED)
def test_whatever_else_a_file_holds_is_refused_in_one_sentence(name: str, tmp_path: Path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(CRAFTED[name])
    with pytest.raises(UserError, match=r"data_batch_1 is not a CIFAR batch \(.*\); fetch it again") as refusal:
        load_batch(path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


def test_a_crafted_memo_takes_no_memory():
    """The C unpickler makes room for all places of the memo below the greatest."""
    content = b"\x80\x02}r\xff\xff\xff\x3f."
    tracemalloc.start()
    assert read(content) == {}
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_one_text_is_not_turned_into_bytes_again_and_again():
    """300 kB that would become 300 MB."""
    words = b"X" + struct.pack("<I", 300_000) + b"a" * 300_000 + b"q\x01"
    again = b"".join(b"h\x00h\x01U\x06latin1\x86R" for _ in range(1000))
    tracemalloc.start()
    with pytest.raises(Refused, match="makes more bytes than it holds"):
        read(b"\x80\x02c_codecs\nencode\nq\x00" + words + b"](" + again + b"e.")
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_one_text_does_not_fill_matrices_again_and_again():
    rows = b"\x80\x02]q\x07T" + struct.pack("<i", 6144) + bytes(6144) + b"q\x08"
    with pytest.raises(Refused, match="makes more bytes than it holds"):
        read(rows + b"".join(matrix(values=b"").replace(b"T\0\0\0\0", b"h\x08") for _ in range(200)) + b".")


def test_tuples_nested_a_thousandfold_are_refused_at_once():
    doubled = b"K\x01" + b"q\x01h\x01\x86" * 500
    with pytest.raises(Refused, match="changes something else|makes something else"):
        read(b"\x80\x02cnumpy\ndtype\n" + doubled + b"R.")


def test_no_changed_byte_crashes_or_gives_anything_but_plain_data():
    """2,000 files of which one byte is another, drawn with a fixed seed; half of them outside the pixels."""
    whole = bytearray(batch(matrix()))
    generator = np.random.default_rng(8)
    outside = [place for place in range(len(whole)) if whole[place]]
    refused = 0
    for number in range(2000):
        changed = bytearray(whole)
        place = int(generator.choice(outside)) if number % 2 else int(generator.integers(len(whole)))
        changed[place] = int(generator.integers(256))
        try:
            found = read(bytes(changed))
        except ValueError:
            refused += 1
            continue
        if isinstance(found, dict):
            for value in found.values():
                assert isinstance(value, (list, tuple, str, bytes, int, dict, np.ndarray)) or value is None
                assert not isinstance(value, np.ndarray) or (value.dtype, value.shape) == (np.uint8, (2, 3072))
    assert refused > 500


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("labels", ["3", "0", "9", "1"], "is not a list of integers"),
        ("labels", [3, 0, 9, True], "is not a list of integers"),
        ("labels", [[3], [0], [9], [1]], "is not a list of integers"),
        ("labels", "3091", "is not a list of integers"),
        ("data", [1, 2], "'data' is list instead of uint8"),
    ],
)
def test_parts_of_another_type_are_refused(tmp_path: Path, part: str, value: Any, words: str):
    from data_prep.datasets.cifar import _images

    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(BATCH | {part: value}, protocol=2))
    with pytest.raises(UserError, match=words):
        _images(path, "labels", 256)


def test_class_names_must_be_texts(tmp_path: Path):
    from data_prep.datasets.cifar import _class_names

    path = tmp_path / "batches.meta"
    for names in ([1, 2], ["a", None], "ab", {"a": 1, "b": 2}):
        path.write_bytes(pickle.dumps({"label_names": names}, protocol=2))
        with pytest.raises(UserError, match="'label_names' is not a list of names"):
            _class_names(path, "label_names", 2)
