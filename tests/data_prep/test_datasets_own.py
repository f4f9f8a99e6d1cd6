"""The user's own arrays and tables, small text files, and what all readers share."""

from __future__ import annotations

import gc
import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.raw_files import RowByRow, Scratch
from data_prep.datasets.registry import DATASETS
from data_prep.holdout import train_test_groups, train_test_rows
from data_prep.raw import RawDataset
from fedmpi import UserError
from fedmpi.data.statistics import statistics

RNG = np.random.default_rng(7)


def test_wide_integers_need_a_task(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(40).reshape(10, 4), y=np.arange(10) % 2)
    with pytest.raises(UserError, match="--task text"):
        _read("arrays", tmp_path / "a.npz")
    raw = _read("arrays", tmp_path / "a.npz", ReadOptions(task="text"))
    assert raw.dtype == "int32" and len(raw.vocabulary) == 40 and raw.mean == ()
    assert _read("arrays", tmp_path / "a.npz", ReadOptions(task="vector")).dtype == "float32"


def test_token_ids_run_from_zero(tmp_path: Path) -> None:
    x = np.arange(40).reshape(10, 4)
    x[3, 1] = -1
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2, x_test=x[:1], y_test=[0])
    tally = Tally()
    raw = _read("arrays", tmp_path / "a.npz", ReadOptions(task="text"), tally)
    assert len(raw.labels) == 9 and len(raw.test_y) == 1 and raw.skipped == 1
    assert "row 3: a token id below 0" in tally.first


def test_rows_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    x = RNG.random((10, 3))
    x[4, 1], x[7, 0] = np.nan, np.inf
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2, x_test=x[:3], y_test=[0, 1, 0])
    tally = Tally()
    raw = _read("arrays", tmp_path / "a.npz", tally=tally)
    assert len(raw.labels) == 8 and raw.skipped == 2 and "array x, row 4" in tally.first
    assert np.isfinite(raw.mean).all() and np.isfinite(raw.std).all()


@pytest.mark.parametrize("bad", [np.inf, 1e300, 0.5])
def test_the_first_label_that_is_no_class_is_named_by_its_row(tmp_path: Path, bad: float) -> None:
    y_test = np.array([0, 1, bad])
    np.savez(tmp_path / "a.npz", x=RNG.random((9, 3)), y=np.arange(9) % 2, x_test=RNG.random((3, 3)), y_test=y_test)
    with pytest.raises(UserError, match="array y_test, row 2"):
        _read("arrays", tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(10, 16, 16, 13), (10, 3, 16, 3)])
def test_images_whose_channels_may_be_either_axis_are_refused_or_read_as_declared(tmp_path: Path, shape) -> None:
    x = RNG.random(shape).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(10) % 2, x_test=x, y_test=np.arange(10) % 2)
    with pytest.raises(UserError, match=r"--channels first for .* or --channels last"):
        _read("arrays", tmp_path / "a.npz")
    last = _read("arrays", tmp_path / "a.npz", ReadOptions(channels="last"))
    assert last.feature_shape == (shape[3], shape[1], shape[2]) and len(last.mean) == shape[3]
    assert np.array_equal(last.read(np.arange(10)), x.transpose(0, 3, 1, 2))
    assert np.array_equal(last.test_x, x.transpose(0, 3, 1, 2))
    first = _read("arrays", tmp_path / "a.npz", ReadOptions(channels="first"))
    assert first.feature_shape == shape[1:] and np.array_equal(first.test_x, x)


def test_bytes_are_texts_and_their_classes_are_named_so(tmp_path: Path) -> None:
    names = np.array(["cat", "été"] * 10)
    np.savez(
        tmp_path / "a.npz", x=RNG.random((20, 2)), y=np.char.encode(names, "utf-8"), user=np.array([b"u", b"v"] * 10)
    )
    raw = _read("arrays", tmp_path / "a.npz")
    assert raw.class_names == ("cat", "été") and raw.user_names == ("u", "v")
    np.savez(tmp_path / "b.npz", x=RNG.random((20, 2)), y=np.char.encode(names, "latin-1"))
    with pytest.raises(UserError, match=r"array y: b'\\xe9t\\xe9' is no UTF-8 text"):
        _read("arrays", tmp_path / "b.npz")


def test_signed_and_unsigned_labels_name_the_same_classes(tmp_path: Path) -> None:
    y = (np.arange(20) % 3).astype(np.uint64)
    np.savez(tmp_path / "a.npz", x=RNG.random((20, 2)), y=y, x_test=RNG.random((3, 2)), y_test=np.arange(3))
    assert _read("arrays", tmp_path / "a.npz").class_names == ("0", "1", "2")


def test_sentiment_rows_that_cannot_be_read_are_named_by_line(tmp_path: Path) -> None:
    good = '"0","1","date","NO_QUERY","anna","sad, very sad"\n'
    bad = '"3","2","date","NO_QUERY","bert","what"\n"4","short"\n'
    latin = '"4","5","d","q","b","caf\xe9"\n'.encode("latin-1")
    (tmp_path / "training.csv").write_bytes((good + bad + good).encode() + latin)
    (tmp_path / "testdata.csv").write_text(good.replace('"0"', '"2"') + good)
    tally = Tally()
    raw = _read("sentiment140", tmp_path, tally=tally)
    assert raw.labels.tolist() == [0, 0, 1] and raw.skipped == 2 and "café" in raw.vocabulary
    assert "training.csv, line 2: the target is '3'" in tally.first
    assert tally.dropped == {"neutral tweets (label 2)": 1} and raw.user_names == ("anna", "b")
    (tmp_path / "training.csv").write_text(good + '"4","5","d","q","b"," "\n' + good)
    raw = _read("sentiment140", tmp_path, tally=(blank := Tally()))
    assert raw.labels.tolist() == [0, 0] and "line 2: the text is empty" in blank.first


def test_mind_rows_with_missing_columns_are_counted(tmp_path: Path) -> None:
    row = "N{}\t{}\t\ttitle {}\t\t\t[]\t[]\n"
    rows = "".join(row.format(number, "news" if number % 2 else "autos", number) for number in range(10))
    blank = row.format(13, "news", 13).replace("title 13", " ")
    (tmp_path / "news.tsv").write_text(rows + "N11\tnews\n" + row.format(12, "", 12) + blank)
    tally = Tally()
    raw = _read("mind", tmp_path, tally=tally)
    assert (len(raw.labels), len(raw.test_y), raw.skipped) == (8, 2, 3)
    assert "line 11: 2 columns instead of 8" in tally.first and raw.class_names == ("autos", "news")


def test_amazon_reads_2014_and_2023_keys_from_several_files(tmp_path: Path) -> None:
    old = {"reviewerID": "A", "overall": 5.0, "reviewText": "fine thing"}
    new = {"user_id": "B", "rating": 1, "text": "bad thing"}
    _json_lines(tmp_path / "old.json.gz", [old] * 5)
    _json_lines(tmp_path / "new.jsonl.gz", [new] * 5 + [{"rating": 9, "text": "x"}])
    with pytest.raises(UserError, match="name those to read with --file"):
        _read("amazon", tmp_path)
    with pytest.raises(UserError, match="no review file odd.json.gz"):
        _read("amazon", tmp_path, ReadOptions(files=("odd.json.gz",)))
    raw = _read("amazon", tmp_path, ReadOptions(files=("old.json.gz", "new.jsonl.gz")))
    assert raw.user_names == ("A", "B") and raw.skipped == 1
    assert sorted([*raw.labels, *raw.test_y]) == [0] * 5 + [4] * 5


def test_a_review_file_is_named_by_its_place_and_once(tmp_path: Path) -> None:
    for stars, place in enumerate(("a.json.gz", "deep/a.json.gz", "deep/b.json.gz", "wide/b.json.gz"), 1):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        _json_lines(tmp_path / place, [{"overall": stars, "reviewText": f"text {row}"} for row in range(10)])
    for name, label in (("a.json.gz", 0), ("deep/a.json.gz", 1), ("wide/b.json.gz", 3)):
        raw = _read("amazon", tmp_path, ReadOptions(files=(name,)))
        assert {*raw.labels.tolist(), *raw.test_y.tolist()} == {label}
    with pytest.raises(
        UserError, match=r"2 files named b.json.gz; --file takes one of: deep/b.json.gz, wide/b.json.gz"
    ):
        _read("amazon", tmp_path, ReadOptions(files=("b.json.gz",)))
    with pytest.raises(UserError, match="names deep/b.json.gz twice"):
        _read("amazon", tmp_path, ReadOptions(files=("deep/b.json.gz", "deep/b.json.gz")))


def test_a_truth_value_is_no_number_of_stars(tmp_path: Path) -> None:
    good = {"reviewerID": "A", "overall": 5.0}
    rows = [good | {"reviewText": f"fine thing {row}"} for row in range(5)] + [
        good | {"overall": True, "reviewText": "x"}
    ]
    _json_lines(tmp_path / "r.json.gz", rows)
    tally = Tally()
    raw = _read("amazon", tmp_path, tally=tally)
    assert raw.skipped == 1 and [*raw.labels, *raw.test_y] == [4] * 5
    assert "line 6: 'overall' is True instead of 1 to 5 stars" in tally.first


def test_a_line_that_is_no_review_is_left_out(tmp_path: Path) -> None:
    reviews = [{"overall": 4, "reviewText": f"thing {row}"} for row in range(5)]
    _json_lines(tmp_path / "r.json.gz", [*reviews, ["overall", 4], reviews[0] | {"reviewText": " "}])
    raw = _read("amazon", tmp_path, tally=(tally := Tally()))
    assert raw.skipped == 2 and [*raw.labels, *raw.test_y] == [3] * 5
    assert "line 6: not a JSON object" in tally.first


def test_a_review_given_twice_counts_once_unless_duplicates_are_kept(tmp_path: Path) -> None:
    review = {"reviewerID": "A", "asin": "1", "overall": 5.0, "reviewText": "fine thing"}
    others = [{"reviewerID": "B"}, {"asin": "2"}, {"reviewText": "bad thing"}]
    unnamed = {key: value for key, value in review.items() if key != "asin"}
    repeated = [review, review | {"overall": 4.0}, review | {"reviewText": " fine thing\n"}]
    _json_lines(tmp_path / "r.json.gz", repeated + [review | other for other in others] + [unnamed] * 4)
    tally = Tally(strict=True)
    raw = _read("amazon", tmp_path, tally=tally)
    assert len(raw.labels) + len(raw.test_y) == 8
    assert list(tally.dropped.values()) == [2] and "--keep-duplicates" in next(iter(tally.dropped))
    assert any("left out: 2 reviews that repeat" in note for note in raw.notes)
    tally = Tally(strict=True)
    raw = _read("amazon", tmp_path, ReadOptions(keep_duplicates=True), tally)
    assert len(raw.labels) + len(raw.test_y) == 10 and not tally.dropped


def test_rows_with_the_same_text_can_be_held_out_together(tmp_path: Path) -> None:
    texts = [f"text {row % 37}" for row in range(100)]
    rows = [{"reviewerID": f"u{row}", "asin": "1", "overall": 5, "reviewText": text} for row, text in enumerate(texts)]
    _json_lines(tmp_path / "r.json.gz", rows)
    assert "--split texts" in _read("amazon", tmp_path).notes[0]
    raw, again = (_read("amazon", tmp_path, ReadOptions(split="texts")) for _ in range(2))
    assert raw.notes == () and 17 <= len(raw.test_y) <= 20 and len(raw.labels) + len(raw.test_y) == 100
    assert np.array_equal(raw.test_x, again.test_x)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_groups_are_held_out_whole_and_never_more_than_a_fifth(drawn: list[int]) -> None:
    groups = np.unique(drawn, return_inverse=True)[1]
    train, test = train_test_groups(groups)
    assert np.array_equal(np.sort(np.r_[train, test]), np.arange(len(groups)))
    assert not set(groups[train]) & set(groups[test])
    sizes, share = np.bincount(groups), len(groups) // 5
    if len(sizes) > 1 and sizes.min() > share:
        assert len(test) == sizes.min()  # the smallest group, as none fits
    else:
        assert len(test) <= share and all(sizes[group] > share - len(test) for group in set(groups[train]))


def test_users_are_kept_only_when_every_training_row_has_one(tmp_path: Path) -> None:
    review = {"overall": 5.0, "reviewText": "fine thing"}
    _json_lines(tmp_path / "r.json.gz", [review | {"reviewerID": "A"}] * 5 + [review] * 5)
    tally = Tally()
    assert _read("amazon", tmp_path, tally=tally).users is None
    assert any("training rows name no user" in note for note in tally.notes)


def test_the_held_out_rows_are_a_fifth_and_always_the_same() -> None:
    train, test = train_test_rows(1003)
    assert len(test) == 200 and np.array_equal(np.sort(np.r_[train, test]), np.arange(1003))
    assert np.array_equal(test, train_test_rows(1003)[1])


def test_channel_statistics_are_those_of_numpy() -> None:
    x = RNG.integers(0, 256, (700, 3, 4, 4), np.uint8)
    mean, std = statistics(lambda rows: x[rows], np.arange(len(x)), 3, 255.0)
    assert np.allclose(mean, (x / 255).mean((0, 2, 3))) and np.allclose(std, (x / 255).std((0, 2, 3)))


def test_scratch_rows_are_those_appended() -> None:
    scratch = Scratch((2, 3), np.int32)
    blocks = [RNG.integers(0, 9, (rows, 2, 3)) for rows in (4, 0, 7)]
    for block in blocks:
        scratch.append(block)
    assert np.array_equal(scratch.rows(), np.concatenate(blocks))
    assert Scratch((2,), np.uint8).rows().shape == (0, 2)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
def test_rows_that_come_one_at_a_time_are_written_in_blocks(
    count: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int] = []
    append = Scratch.append

    def counted(scratch: Scratch, rows: NDArray[Any]) -> None:
        blocks.append(len(rows))
        append(scratch, rows)

    monkeypatch.setattr(Scratch, "append", counted)
    expected = RNG.integers(-9, 9, (count, *shape))
    rows = RowByRow(shape, np.int32, 4)
    for number, row in enumerate(expected.tolist(), 1):
        rows.add(row)
        assert len(rows) == number and blocks == [4] * (number // 4)
    found = rows.rows()
    assert blocks == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    assert rows.shape == shape and found.shape == (count, *shape) and found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


def test_rows_are_the_bytes_of_a_file_and_may_go_on_after_they_are_read() -> None:
    rows = RowByRow((2,), np.float32, 3)
    for row in range(4):
        rows.add([row, row / 3])
    first = rows.rows()
    rows.add(np.array([4, 4 / 3]))
    expected = np.stack([np.arange(5), np.arange(5) / 3], 1).astype(np.float32)
    np.testing.assert_array_equal(rows.rows(), expected)
    np.testing.assert_array_equal(first, expected[:4])
    with open(rows._written._file.fileno(), "rb", closefd=False) as file:
        file.seek(0)
        assert file.read() == expected.tobytes()


@pytest.mark.parametrize("wrong", [[1, 2, 3], [1], 1, [[1, 2]]])
def test_a_row_of_another_shape_is_refused_with_its_block(wrong: Any) -> None:
    among, alone = RowByRow((2,), np.int32, 2), RowByRow((2,), np.int32, 2)
    among.add([1, 2])
    with pytest.raises(ValueError):
        among.add(wrong)
    alone.add(wrong)
    with pytest.raises(ValueError):
        alone.rows()


def test_numbers_beyond_the_type_of_rows_are_infinite_or_refused() -> None:
    floats, whole = RowByRow((2,), np.float32, 8), RowByRow((2,), np.int32, 8)
    floats.add([1e39, -1e300])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert floats.rows().tolist() == [[np.inf, -np.inf]]
    whole.add([0, 1 << 31])
    with pytest.raises(OverflowError):
        whole.rows()


def _read(name: str, raw: Path, options: ReadOptions | None = None, tally: Tally | None = None) -> RawDataset:
    return DATASETS[name].read(raw, options or ReadOptions(), tally or Tally())


def _json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_a_scratch_file_is_closed_with_its_object_and_its_map_stays() -> None:
    scratch = Scratch((2,), np.int32)
    scratch.append(np.arange(6).reshape(3, 2))
    file, rows = scratch._file, scratch.rows()
    assert not file.closed
    del scratch
    gc.collect()
    assert file.closed
    np.testing.assert_array_equal(rows, np.arange(6).reshape(3, 2))
