"""Table of all contestants of a workload, run in sequence and in several passes, with ratios to the naive loop.

The machine's speed varies with time and with other programs. Ratios are therefore taken within a pass, shortly after
the reference ran. The table shows the median over the passes and the range.
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
"""Number of cores used by other programs above which a pass is marked as disturbed."""


@dataclass
class Row:
    """Measurements of one contestant, pass by pass."""

    name: str
    # Median seconds of a round, and their ratio to the reference's, pass by pass
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    clients: float = 0.0  # Clients and samples per round
    samples: float = 0.0
    steps: int = 0  # Steps of the last round; equal among contestants that do the same work
    loss: float | None = None  # Test loss after the last round
    peak_bytes: int = 0
    others: list[float] = field(default_factory=list)  # Cores used by other programs
    failure: str = ""  # Reason why it could not be run, or ""


def race(
    workload: Workload,
    data: Path,
    work: Path,
    passes: int,
    quick: bool,
    pythons: Mapping[str, str],
    device: str | None = None,
) -> list[Row]:
    """Run every contestant of a workload once per pass; `pythons` and `device` as in `contestants`."""
    return run_all(workload, contestants(workload, quick, pythons, device), data, work, passes)


def run_all(workload: Workload, entrants: Sequence[Contestant], data: Path, work: Path, passes: int) -> list[Row]:
    """Run the entrants once per pass, the reference first."""
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
    """Return the result folder of the entrant at this place in a pass."""
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
    """Return the rows as Markdown."""
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
    """Return one line that describes a round."""
    if workload.wanted:
        return f"{workload.name}: FedSampling, K = {workload.wanted:,} of {workload.clients:,} clients' samples"
    return (
        f"{workload.name}: {workload.model} with {workload.clients:,} clients, {workload.cohort} a round, "
        f"B = {workload.batch}"
    )
