"""The marks on docs/results.md follow from its intervals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies.results_page import PAGE, main

TABLE = """# Page

Two methods, n = 3:

| | accuracy |
|---|---:|
{rows}

{text}
"""


def checked(page: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["results_page", str(page), *words])
    main()
    return page.read_text()


def test_the_page_of_results_has_the_marks_that_its_intervals_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / PAGE
    before = page.read_text()
    assert checked(page, monkeypatch) == before and before.count("significant at a false discovery rate of 5 %") > 30


@pytest.mark.parametrize(
    ("rows", "text", "marked"),
    [  # half-widths of n = 3: p = 0.05 where the mean equals it, 0.0135 at twice as much, 0.0001 at 23 times
        pytest.param(["+1.1 [+0.1, +2.1]"], "", [], id="one comparison"),
        pytest.param(["+1.1 [+0.1, +2.1]", "+0.0 [−1.0, +1.0]"], "", ["+2.1]"], id="two comparisons, one at the limit"),
        pytest.param(["+2.0 [+1.0, +3.0]", "+0.0 [−1.0, +1.0]"], "", [], id="two comparisons, one far from it"),
        pytest.param(["−2.0 [−3.0, −1.0]", *["+0.0 [−1.0, +1.0]"] * 3], "", ["−1.0]"], id="one of four, negative"),
        pytest.param(["+2.0 [+1.0, +3.0]"] * 4, "", [], id="four of four"),
        pytest.param(["+23.0 [+22.0, +24.0]", "+1.1 [+0.1, +2.1]"], "", [], id="half of them certain"),
        pytest.param(["0.50 [0.30, 0.83]", "1.00 [0.50, 2.00]"], "", ["0.83]"], id="ratios, whose null is one"),
        pytest.param(["+2.0 [+1.0, +3.0] (n = 2)", "+0 [−1, +1]"], "", ["+3.0]"], id="fewer seeds"),
        pytest.param(
            ["+2.0 [+1.0, +3.0]"], "Less by 2.0 [1.0, 3.0], and `x` 1.1 [0.1, 2.1].", [], id="text of its own"
        ),
        pytest.param([], "By 1.1 [0.1, 2.1]; 0.0 [−1.0, 1.0]; in [0, 1]; a further run: [1, 2].", ["2.1]"], id="text"),
    ],
)
def test_a_mark_stands_where_benjamini_and_hochberg_do_not_reject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str], text: str, marked: list[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(TABLE.format(rows="\n".join(f"| a | {row} |" for row in rows), text=text))
    written = checked(page, monkeypatch, "--write")
    assert [part.split()[-1] for part in written.split("†")[:-1]] == marked
    assert (f"*{len(rows)} comparison" in written) == bool(rows)
    assert checked(page, monkeypatch) == written, "a second time nothing changes"
    if marked:
        page.write_text(written.replace("†", ""))
        with pytest.raises(SystemExit, match="out of date"):
            checked(page, monkeypatch)
