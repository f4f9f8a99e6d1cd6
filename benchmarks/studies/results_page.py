"""Control the false discovery rate of the intervals in docs/results.md.

    python -m benchmarks.studies.results_page            # list what does not survive; exit code 1 if marks are missing
    python -m benchmarks.studies.results_page --write    # set the marks and the counts

Each table is a family, and so is the text of each section, without the intervals that it repeats from its tables. The
p-value of an interval follows from its center, its half-width and the number of seeds, the nearest `n = …` before it.
An interval that fits its estimate in logarithms only is one of a ratio. Benjamini and Hochberg (1995) decide at 5 % per
family. † follows a 95 % interval that excludes zero where the difference is not significant. Prediction intervals
("further run") and the ranges [0, 1] and [−1, 1] are left out. Numbers have one or two decimals, so that decisions at
the limit can go either way.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from scipy import special

from fedmpi.results.comparison import LEVEL, Difference, corrected

PAGE = Path("docs/results.md")
MARK = "†"
NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(rf"(?<!\w)\[(?![0−]1?, 1\])({NUMBER}), ({NUMBER})\]{MARK}?(?!\()")
ESTIMATE = re.compile(rf"(?<![\w.]){NUMBER}(?![\w.])")
WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "seven": 7, "eight": 8, "ten": 10}
SEEDS = re.compile(rf"n = (\d+)|\b({'|'.join(WORDS)})(?: other)? seeds\b")
COUNT = r"\*\d+ comparisons?, .*\*"


@dataclass
class Found:
    """An interval of the page: line, place in it, section, family, and whether zero lies outside.

    `name` is the same for an interval and its mirror image.
    """

    line: int
    span: tuple[int, int]
    section: str
    table: bool
    family: str
    name: frozenset[float]
    difference: Difference
    excludes: bool


def value(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def decimals(text: str) -> int:
    return len(text.partition(".")[2])


def difference(before: str, low: str, high: str, n: int) -> tuple[Difference, bool]:
    """The difference (of logarithms, for a ratio) behind an interval, and whether it excludes none."""
    a, b = value(low), value(high)
    last = ESTIMATE.findall(before)
    unit = 10.0 ** -max(decimals(low), decimals(high))
    ratio = False
    if last and a > 0 and "." in low:
        middle, center = abs(value(last[-1]) - (a + b) / 2), abs(value(last[-1]) - math.sqrt(a * b))
        ratio = middle > unit and center < middle
    if ratio:
        excludes, a, b, unit = not a <= 1 <= b, math.log(a), math.log(b), unit / a
    else:
        excludes = (a > 0 or (a == 0 and low[0] != "−")) and not (a == 0 and low[0] not in "+−") or b < 0
        excludes = excludes or (b == 0 and high[0] == "−")
    half = max((b - a) / 2, unit / 4)
    error = half / float(special.stdtrit(n - 1, (1 + LEVEL) / 2))
    return Difference(n, (a + b) / 2, error), excludes


def seeds(text: str) -> int | None:
    """The last number of seeds that a text names."""
    named = [int(number) if number else WORDS[word] for number, word in SEEDS.findall(text)]
    return named[-1] if named else None


def read(lines: list[str]) -> list[Found]:
    found, section, table, n, fenced = [], "", 0, 3, False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        if line.startswith("#"):
            section = line.lstrip("# ")
        if fenced:
            continue
        row = line.startswith("|")
        table += row and not lines[number - 1].startswith("|")
        family = f"{section}, table {table}" if row else f"{section}, text"
        plain = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), line)
        for one in INTERVAL.finditer(plain):
            cell = plain[plain.rfind("|", 0, one.start()) + 1 if row else 0 : one.start()]
            if "further run" in plain[max(0, one.start() - 130) : one.start()]:
                continue
            count = seeds(cell) or (seeds(plain) if row else None) or n
            each, excludes = difference(cell, one[1], one[2], count)
            name = frozenset(abs(value(end)) for end in one.groups())
            found.append(Found(number, one.span(), section, row, family, name, each, excludes))
        n = seeds(plain) or n
    return found


def sentence(text: str, start: int) -> str:
    """What surrounds a place: from the last full stop, semicolon or cell border to the next."""
    left = max(text.rfind(mark, 0, start) for mark in (". ", "; ", "| "))
    ends = [at for mark in (". ", "; ", " |") if (at := text.find(mark, start)) >= 0]
    return text[left + 2 : min(ends, default=len(text))]


def marked(text: str) -> tuple[str, list[str]]:
    """The page with marks and counts set anew, and the sentences with a mark."""
    lines = re.sub(rf"\n\n{COUNT}$", "", INTERVAL.sub(lambda one: one[0].rstrip(MARK), text), flags=re.M).split("\n")
    families: dict[str, list[Found]] = {}
    for one in read(lines):
        families.setdefault(one.family, []).append(one)
    report, marks, counts = [], [], []
    decided: dict[tuple[str, frozenset[float]], bool] = {}
    for family, members in sorted(families.items(), key=lambda item: not item[1][0].table):
        new = [one for one in members if one.table or (one.section, one.name) not in decided]
        kept = corrected([one.difference for one in new])
        decided |= {(one.section, one.name): each.significant for one, each in zip(new, kept, strict=True)}
        for one in members:
            if one.excludes and not decided[one.section, one.name]:
                marks.append((one.line, one.span[1]))
                words = sentence(lines[one.line], one.span[0])
                report.append(f"{one.line + 1} ({family}; m = {len(kept)}, p = {one.difference.p:.3f}): {words}")
        if members[0].table:
            significant = sum(each.significant for each in kept)
            words = f"{len(kept)} comparison{'s' * (len(kept) > 1)}, {significant} significant"
            counts.append((members[-1].line, f"*{words} at a false discovery rate of 5 %.*"))
    for line, at in sorted(marks, reverse=True):
        lines[line] = lines[line][:at] + MARK + lines[line][at:]
    for line, words in sorted(counts, reverse=True):
        while line + 1 < len(lines) and lines[line + 1].startswith("|"):
            line += 1
        lines[line + 1 : line + 1] = ["", words]
    return "\n".join(lines), report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    parser.add_argument("--write", action="store_true", help="set marks and counts in the page")
    given = parser.parse_args()
    text = given.page.read_text()
    wanted, report = marked(text)
    print("\n".join(report))
    if given.write:
        given.page.write_text(wanted)
    elif wanted != text:
        sys.exit(f"{given.page}: marks or counts are out of date. Run with --write.")


if __name__ == "__main__":
    main()
