"""Correct the confidence intervals of the reproduced papers for the number of comparisons.

    python -m benchmarks.studies.paper_intervals           # check; exit code 1 if something is out of date
    python -m benchmarks.studies.paper_intervals --write   # set the columns corrected_low, corrected_high, significant

`docs/papers/data/*.csv` has one row per number. A row with `low` and `high` is a comparison with its 95 % confidence
interval. All comparisons with the same `table`, whatever their file, are one family. Benjamini and Hochberg (1995)
control the false discovery rate at 5 % in each family, and Benjamini and Yekutieli (2005) widen its intervals
accordingly. `scale` is "ratio" for an interval that is symmetric in logarithms and excludes one, not zero.

The check also finds every interval "value [low, high]" on docs/papers/*.md: it must be a corrected interval of a file
that the page links to.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
from pathlib import Path

from scipy import special

from fedmpi.results.comparison import LEVEL, Difference, corrected

PAGES = Path("docs/papers")
COLUMNS = ["table", "row", "column", "n", "value", "sd", "low", "high", "scale", "corrected_low", "corrected_high"]
COLUMNS += ["significant", "note"]
NUMBER = r"[+−]?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(rf"(?P<value>{NUMBER}) (?:times )?\[(?P<low>{NUMBER}), (?P<high>{NUMBER})\]")
ANY_INTERVAL = re.compile(rf"(?<!\w)\[(?![0−]1?, 1\]){NUMBER}, {NUMBER}\](?!\()")
Row = dict[str, str]


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


def difference(row: Row) -> Difference:
    """Return the difference (of logarithms, for a ratio) of an interval, at least half a digit wide."""
    low, high = float(row["low"]), float(row["high"])
    unit = 10.0 ** -max(decimals(row["low"]), decimals(row["high"]))
    if row["scale"] == "ratio":
        low, high, unit = math.log(low), math.log(high), unit / low
    half = max((high - low) / 2, unit / 4)
    n = int(row["n"])
    return Difference(n, (low + high) / 2, half / float(special.stdtrit(n - 1, (1 + LEVEL) / 2)))


def excludes_none(row: Row) -> bool:
    """Check whether the interval before correction excludes zero (one, for a ratio); "-0.0" is just below zero."""
    low, high = row["low"], row["high"]
    if row["scale"] == "ratio":
        return not float(low) <= 1 <= float(high)
    return not low.startswith("-") or (high.startswith("-") and not low == "-0.0" == high)


def correct(rows: list[Row]) -> None:
    """Set the corrected columns of all comparisons, family by family."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        row.update(corrected_low="", corrected_high="", significant="")
        if row["low"]:
            families.setdefault(row["table"], []).append(row)
    for family in families.values():
        for row, one in zip(family, corrected([difference(row) for row in family]), strict=True):
            low, high = (math.exp(one.low), math.exp(one.high)) if row["scale"] == "ratio" else (one.low, one.high)
            digits = max(decimals(row["low"]), decimals(row["high"]))
            significant = one.significant and excludes_none(row)
            row.update(
                corrected_low=f"{low:.{digits}f}",
                corrected_high=f"{high:.{digits}f}",
                significant="yes" if significant else "no",
            )


def read(folder: Path) -> dict[Path, list[Row]]:
    files = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            files[path] = list(csv.DictReader(file))
    return files


def written(rows: list[Row]) -> str:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def plain(number: str) -> str:
    return number.replace("−", "-").replace(",", "").removeprefix("+")


def wrong_intervals(page: Path, files: dict[Path, list[Row]]) -> list[str]:
    """List the intervals of a page that are not corrected intervals of a file it links to."""
    text = page.read_text(encoding="utf-8")
    linked = [rows for path, rows in files.items() if f"data/{path.name})" in text]
    known = {(row["value"], row["corrected_low"], row["corrected_high"]) for rows in linked for row in rows}
    text = re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [(plain(one["value"]), plain(one["low"]), plain(one["high"])) for one in INTERVAL.finditer(text)]
    wrong = [f"{page}: {value} [{low}, {high}]" for value, low, high in found if (value, low, high) not in known]
    if (without := len(ANY_INTERVAL.findall(text)) - len(found)) > 0:
        wrong.append(f"{page}: {without} intervals without a value before them")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="?", default=PAGES, help="folder of the pages and of data/")
    parser.add_argument("--write", action="store_true", help="set the corrected columns of the files")
    given = parser.parse_args()
    files = read(given.pages / "data")
    correct([row for rows in files.values() for row in rows])
    problems = []
    for path, rows in files.items():
        if given.write:
            path.write_text(written(rows), encoding="utf-8")
        elif path.read_text(encoding="utf-8") != written(rows):
            problems.append(f"{path}: columns are out of date. Run with --write.")
    for page in sorted(given.pages.glob("*.md")):
        problems += wrong_intervals(page, files)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
