"""Comparisons as tables: on the terminal, as CSV with all digits, as LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console

from fedmpi.common.terminal import paragraph, show_table
from fedmpi.results.comparison import Comparison, Row, Spread, in_percent
from fedmpi.results.loading import GroupsAlike, plain

UNITS = {"round": ("rounds", 1), "samples": ("samples", 0), "megabytes": ("MB", 1), "virtual_seconds": ("virtual s", 1)}
"""Unit and number of digits of each cost up to a target."""
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
)
MINUS = re.compile(r"(?<![^\s\[(])-(?=\d)")
"""The sign of a number, and no hyphen."""
POWER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?)0*(\d+)(?![\w.])")
"""A number as Python writes very large and very small ones: 1.5e-05."""


def print_comparison(comparison: Comparison, screen: Console) -> None:
    """Every block as a table, with what a reader has to know below."""
    for block, rows in comparison.blocks:
        heads, cells = _cells(comparison, rows)
        _show(screen, heads, cells, block.title if len(comparison.blocks) > 1 else "")
        for line in (*block.notes, *_corrected(rows)):
            print(paragraph(line, "note  ", "    "))
    for line in _without_reference(comparison):
        print(paragraph(line, "note  ", "    "))
    if len(comparison.blocks) > 1:
        words = "runs on other data, or evaluated on another part, are in separate tables and are not compared"
        print(paragraph(words, "note  ", "    "))
    for line in _left_out(comparison):
        print(paragraph(line, "left out: ", "    "))


def _corrected(rows: Sequence[Row], mark: str = '"significant"') -> list[str]:
    """Comparisons and seeds of a table and the correction of its intervals; nothing where it has none."""
    found = [row.interval for row in rows if row.interval is not None]
    if not found:
        return []
    seeds = [str(one.n) for one in sorted(found, key=lambda one: one.n)]
    return [
        f"{len(found)} comparison{'s' * (len(found) > 1)} over {' to '.join(dict.fromkeys((seeds[0], seeds[-1])))} "
        f"seeds. In brackets: {100 * found[0].level:.4g} % confidence intervals (paired t), corrected for a false "
        f"discovery rate of 5 % in this table (Benjamini-Hochberg, FCR). {mark}: the interval excludes 0"
    ]


def _show(screen: Console, heads: list[str], cells: list[list[str]], title: str) -> None:
    """A table; where the terminal is too narrow, its columns below one another, each time behind the first one."""
    widths = [max(map(cell_len, column)) + 3 for column in zip(heads, *cells, strict=True)]
    parts: list[list[int]] = [[]]
    for number, width in enumerate(widths[1:], 1):
        if parts[-1] and 1 + widths[0] + sum(widths[one] for one in parts[-1]) + width > screen.width:
            parts.append([])
        parts[-1].append(number)
    for part in parts:
        chosen = [0, *part]
        show_table(screen, [heads[n] for n in chosen], [[row[n] for n in chosen] for row in cells], title)


def _without_reference(comparison: Comparison) -> list[str]:
    """The rows of each block that are compared with nothing."""
    if comparison.reference is None:
        return []
    wanted, found = comparison.reference, []
    for _, rows in comparison.blocks:
        others = [row.group for row in rows if row.reference is None]
        alone = [
            group.label
            for group in others
            if not group.is_called(wanted) and plain(wanted) not in map(plain, group.parts.values())
        ]
        if alone:
            words = f"no row named {comparison.reference} is otherwise as {'; '.join(alone)}: no difference is shown"
            found.append(words)
    return found


def _left_out(comparison: Comparison) -> list[str]:
    """Failed runs with their reasons; all others of a kind in one line."""
    kinds: dict[str, list[str]] = {}
    for run in comparison.left_out:
        kinds.setdefault(run.state, []).append(run.state_text if run.state == "failed" else run.where)
    lines = kinds.pop("failed", [])
    words = {
        "unfinished": "not finished",
        "not begun": "not begun",
        "finished": f"without {comparison.metric} in the end",
    }
    return [*lines, *(f"{words[kind]}: {', '.join(runs)}" for kind, runs in kinds.items())]


def as_csv(comparison: Comparison) -> str:
    """Return one line per group: numbers with all digits, the metric as recorded and not in per cent.

    Each key that distinguishes groups has a column, which is empty for groups without the key.
    """
    parts = list(dict.fromkeys(key for _, rows in comparison.blocks for row in rows for key in row.group.values))
    costs = list(dict.fromkeys(key for _, rows in comparison.blocks for row in rows for key in row.costs))
    heads = ["block", "group", *parts, "seeds", "n", "metric", "mean", "std", "best_mean", "best_std", "reference"]
    heads += ["common_seeds", "difference", "low", "high", "level", "comparisons", "significant", "target", "reached"]
    heads += [f"{key}_{kind}" for key in costs for kind in ("mean", "std")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    for block, rows in comparison.blocks:
        comparisons = sum(row.interval is not None for row in rows)
        for row in rows:
            found, group = row.interval, row.group
            line: list[object] = [block.title, group.label, *(group.values.get(key) for key in parts)]
            line += [" ".join(map(str, group.runs)), row.final.n, comparison.metric]
            line += [row.final.mean, row.final.deviation]
            line += [row.best.mean, row.best.deviation] if row.best else [None, None]
            line += [row.reference.label if row.reference else "", " ".join(map(str, row.common))]
            line += [row.difference, *((found.low, found.high, found.level) if found else (None, None, None))]
            line += [comparisons, found.significant] if found else [None, None]
            line += [comparison.target, row.reached if comparison.target is not None else None]
            for key in costs:
                line += [row.costs[key].mean, row.costs[key].deviation] if key in row.costs else [None, None]
            writer.writerow("" if value is None else value for value in line)
    return text.getvalue()


def as_latex(comparison: Comparison) -> str:
    """A tabular with the rules of booktabs for each block; stars mark significant differences."""
    return "\n".join(_tabular(comparison, block, rows) for block, rows in comparison.blocks)


def _tabular(comparison: Comparison, block: GroupsAlike, rows: Sequence[Row]) -> str:
    heads, cells = _cells(comparison, rows, "*")
    lines = [f"% {' '.join((block.title or comparison.metric).split())}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", _latex_row(heads), r"\midrule"]
    lines += [_latex_row(row) for row in cells]
    for line in _corrected(rows, "*"):
        lines += [
            r"\midrule",
            rf"\multicolumn{{{len(heads)}}}{{p{{\linewidth}}}}{{\footnotesize {_latex_cell(line)}}} \\",
        ]
    lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _latex_row(cells: Sequence[str]) -> str:
    line = " & ".join(_latex_cell(cell) for cell in cells) + r" \\"
    return f"{{}}{line}" if line.startswith(("[", "*")) else line  # else an option of the command before it


def _latex_cell(cell: str) -> str:
    plain = " ".join(cell.split()).translate(LATEX).replace("±", r"$\pm$")
    return POWER.sub(_power, MINUS.sub("$-$", plain))


def _power(found: re.Match[str]) -> str:
    sign = "-" if found[2] == "-" else ""
    return rf"${found[1]} \cdot 10^{{{sign}{found[3]}}}$"


def _cells(
    comparison: Comparison, rows: Sequence[Row], mark: str = " significant"
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of one block; `mark` follows significant differences."""
    share = in_percent(comparison.metric)
    name = comparison.metric.replace("_", " ") + (", %" if share else "")
    late = f" (last {comparison.last} rounds)" if comparison.last > 1 else ""
    references = {row.reference.label for row in rows if row.reference is not None}
    summits = any(row.best is not None for row in rows)
    heads = ["", "n", f"{name}{late}", *(["best"] if summits else [])]
    if references:
        heads.append(f"difference to {references.pop() if len(references) == 1 else comparison.reference}")
    spent = list(dict.fromkeys(key for row in rows for key in row.costs))
    if comparison.target is not None:
        goal = f"{100 * comparison.target:g} %" if share else f"{comparison.target:g}"
        heads += [f"{UNITS[key][0]} to {goal}" for key in spent] or [f"to {goal}"]
    cells = []
    for row in rows:
        line = [row.group.label, str(row.final.n), _spread(row.final, share)]
        line += [_spread(row.best, share)] if row.best else []
        line += [_difference(row, share, mark)] if any(one.reference is not None for one in rows) else []
        if comparison.target is not None:
            line += [_cost(row, key) for key in spent] or ["not reached"]
        cells.append(line)
    return heads, cells


def _difference(row: Row, share: bool, mark: str) -> str:
    if row.reference is None:
        return ""
    if row.difference is None:
        return "no seed in common"
    text = _number(row.difference, share, "+")
    found = row.interval
    if found is None:
        alike = "" if len(row.common) == 1 else " alike"
        return f"{text} (n = {len(row.common)}{alike}: no interval)"
    few = f" (n = {found.n})" if found.n < row.final.n else ""
    interval = f"[{_number(found.low, share, '+')}, {_number(found.high, share, '+')}]"
    return f"{text} {interval}{few}{mark if found.significant else ''}"


def _cost(row: Row, key: str) -> str:
    if key not in row.costs:
        return "not reached"
    _, digits = UNITS[key]
    cost = row.costs[key]
    text = f"{cost.mean:,.{digits}f}"
    text += f" ± {cost.deviation:,.{digits}f}" if cost.deviation is not None else ""
    return text if row.reached == row.final.n else f"{text} ({row.reached} of {row.final.n})"


def _spread(spread: Spread, share: bool) -> str:
    text = _number(spread.mean, share)
    return text if spread.deviation is None else f"{text} ± {_number(spread.deviation, share)}"


def _number(value: float, share: bool, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f}" if share else f"{value:{sign}.4g}"
