"""The intervals of the reproduced papers are corrected for the number of comparisons, and the pages show those."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies.paper_intervals import COLUMNS, PAGES, correct, main, read, wrong_intervals

ROOT = Path(__file__).parents[2]


def comparisons(*intervals: str, n: int = 3, scale: str = "") -> list[dict[str, str]]:
    """One family, each interval given as "value low high"."""
    rows = []
    for interval in intervals:
        value, low, high = interval.split()
        rows.append(
            dict.fromkeys(COLUMNS, "")
            | {"table": "one", "n": str(n), "value": value, "low": low, "high": high, "scale": scale}
        )
    return rows


def test_files_and_pages_are_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["paper_intervals"])
    main()
    rows = [row for rows in read(PAGES / "data").values() for row in rows]
    assert sum(bool(row["low"]) for row in rows) > 500


@pytest.mark.parametrize(
    ("rows", "significant"),
    [  # half-widths of n = 3: p = 0.05 where the mean equals it, 0.0135 at twice as much
        pytest.param(comparisons("1.1 0.1 2.1"), "yes", id="one comparison"),
        pytest.param(comparisons("1.1 0.1 2.1", "0.0 -1.0 1.0"), "no no", id="two comparisons, one at the limit"),
        pytest.param(comparisons(*["2.0 1.0 3.0"] * 4), "yes yes yes yes", id="four of four"),
        pytest.param(comparisons("0.10 0.08 0.12", "1.00 0.50 2.00", scale="ratio"), "yes no", id="a clear ratio"),
    ],
)
def test_benjamini_and_hochberg_decide_and_the_corrected_interval_agrees(
    rows: list[dict[str, str]], significant: str
) -> None:
    correct(rows)
    assert [row["significant"] for row in rows] == significant.split()
    for row in rows:
        low, high, none = float(row["corrected_low"]), float(row["corrected_high"]), float(row["scale"] == "ratio")
        assert low <= float(row["low"]) and high >= float(row["high"]), "an interval never gets narrower"
        assert (not low <= none <= high) == (row["significant"] == "yes")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        pytest.param("By +1.1 [+0.1, +2.1] ([data](data/x.csv)).", 0, id="the corrected interval"),
        pytest.param("By −1.1 [+0.1, +2.1] ([data](data/x.csv)).", 1, id="another value"),
        pytest.param("By +1.1 [+0.1, +2.1].", 1, id="no link to the file"),
        pytest.param("Images in [0, 1], and `a[1, 2]`.", 0, id="not a confidence interval"),
    ],
)
def test_an_interval_of_a_page_must_be_one_of_its_files(tmp_path: Path, text: str, wrong: int) -> None:
    rows = comparisons("1.1 0.1 2.1")
    correct(rows)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(wrong_intervals(page, {Path("data/x.csv"): rows})) == wrong
