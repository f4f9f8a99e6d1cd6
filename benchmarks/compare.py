"""The table: all contestants of a workload one after another, again and again, beside the naive loop of the same pass.

The machine's speed drifts and other programs come and go: ratios are taken within a pass, where the reference ran a
minute before or after, and the median over the passes is shown with its spread.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.contestants import REPOSITORY, Contestant, contestants
from benchmarks.measure import ContestantFailed, run_tree
from benchmarks.workloads import WARM_UP, Workload, prepare

BUSY_ELSEWHERE = 0.3
"""Cores used by others above which a pass is marked as disturbed."""


@dataclass
class Row:
    """The passes of one contestant."""

    name: str
    # Median seconds of a round, and that divided by the reference's, pass by pass
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    clients: float = 0.0  # Participants and samples of a round
    samples: float = 0.0
    steps: int = 0  # Of the last round; equal among contestants that do the same work
    loss: float | None = None  # Test loss after the last round
    peak_bytes: int = 0
    others: list[float] = field(default_factory=list)  # Cores that others used
    failure: str = ""  # Why it could not be run, if so


def race(
    workload: Workload,
    data: Path,
    work: Path,
    passes: int,
    quick: bool,
    pythons: Mapping[str, str],
    device: str | None = None,
) -> list[Row]:
    """Run every contestant of a workload once a pass; `pythons` and `device` as in `contestants`."""
    return run_all(workload, contestants(workload, quick, pythons, device), data, work, passes)


def run_all(workload: Workload, entrants: Sequence[Contestant], data: Path, work: Path, passes: int) -> list[Row]:
    """Run the entrants once a pass, the reference first."""
    prepare(workload, data)
    rows = [Row(entrant.name) for entrant in entrants]
    for number in range(passes):
        reference = None
        for place, (entrant, row) in enumerate(zip(entrants, rows, strict=True)):
            if row.failure:
                continue
            out = result_folder(work, workload, number, place)
            out.mkdir(parents=True)
            try:
                seconds = _measure(workload, entrant, row, data, out)
            except ContestantFailed as error:
                row.failure = str(error).strip().splitlines()[-1]
                print(error, file=sys.stderr, flush=True)
                continue
            reference = reference or seconds
            row.ratios.append(seconds / reference)
            print(f"pass {number + 1}  {workload.name}  {row.name:45s} {1e3 * seconds:9.1f} ms", file=sys.stderr)
    return rows


def result_folder(work: Path, workload: Workload, number: int, place: int) -> Path:
    """Where the entrant of this place leaves its results in a pass."""
    return work / f"{workload.name}-{number}-{place}"


def _measure(workload: Workload, entrant: Contestant, row: Row, data: Path, out: Path) -> float:
    used = run_tree(entrant.command(data, out), out / "log.txt", entrant.environment, REPOSITORY)
    result = entrant.read(out)
    counted = slice(WARM_UP, None)
    seconds = float(statistics.median(result["seconds"][counted]))
    row.seconds.append(seconds)
    row.samples = float(np.mean(result["samples"][counted]))
    row.clients = float(workload.cohort or workload.clients)
    row.steps, row.loss = result["steps"][-1], result["loss"][1]
    row.peak_bytes = max(row.peak_bytes, used.peak_bytes)
    row.others.append(used.others_cores)
    return seconds


def table(workload: Workload, rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    reference = rows[0].name
    lines = [
        f"### {title(workload)}",
        "",
        f"| contestant | ms a round | against {reference} (lowest to highest pass) | clients/s | samples/s "
        "| peak MB | steps | test loss | others' cores |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    if row.failure:
        return f"| {row.name} | failed: {row.failure[:100]} | | | | | | | |"
    seconds, ratio = statistics.median(row.seconds), statistics.median(row.ratios)
    spread = f" ({min(row.ratios):.2f} to {max(row.ratios):.2f})" if len(row.ratios) > 1 else ""
    loss = "" if row.loss is None else f"{row.loss:.4f}"
    others = f"{statistics.median(row.others):.1f}" + (" !" if max(row.others) > BUSY_ELSEWHERE else "")
    return (
        f"| {row.name} | {1e3 * seconds:.1f} | {ratio:.2f}{spread} | {row.clients / seconds:,.0f} "
        f"| {row.samples / seconds:,.0f} | {row.peak_bytes / 1e6:.0f} | {row.steps} | {loss} | {others} |"
    )


def title(workload: Workload) -> str:
    """One line that says what a round is."""
    if workload.wanted:
        return f"{workload.name}: FedSampling, K = {workload.wanted:,} of {workload.clients:,} clients' samples"
    return (
        f"{workload.name}: {workload.model} with {workload.clients:,} clients, {workload.cohort} a round, "
        f"B = {workload.batch}"
    )
