"""Time of fedmpi's rounds by phase, and busy time of every rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import title
from benchmarks.contestants import REPOSITORY, fedmpi_command, read_records, settings
from benchmarks.measure import run_tree
from benchmarks.workloads import WARM_UP, Workload, prepare

PHASES = ("plan", "load", "train", "reduce", "apply", "evaluate")
VARIANTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("1 rank", 1, {}),
    ("2 ranks, rank 0 serves", 2, {"cluster.server_trains": "never"}),
    ("2 ranks, all train", 2, {"cluster.server_trains": "always"}),
    ("3 ranks", 3, {}),
    ("3 ranks, data stays with its owner", 3, {"cluster.placement": "owner"}),
    ("3 ranks, evaluated every round", 3, {"evaluation.every": 1}),
)

TRAINS_ABOVE = 0.25
"""Share of the busiest rank's work above which a rank counts as training; planning and evaluating are below."""


def profile(workload: Workload, data: Path, work: Path, device: str | None = None) -> str:
    """Return the median milliseconds of every phase of a round as Markdown.

    `load` and `train` are the slowest rank's. `others` is the rest of the round after the busiest rank's work: the
    plan, the sum, the server's step, and waiting for all of these without spinning. Imbalance is the busiest rank's
    work over the mean of those that train. On a given `device` only the first two variants are run.
    """
    prepare(workload, data)
    lines = [
        f"### {title(workload)}: milliseconds of a round",
        "",
        "| | round | " + " | ".join(PHASES) + " | busiest rank | others | imbalance | busy per rank |",
        "|---|" + "---:|" * (len(PHASES) + 4) + "---|",
    ]
    for name, ranks, keys in VARIANTS[: None if device is None else 2]:
        out = work / f"profile-{workload.name}-{len(lines)}"
        out.mkdir(parents=True)
        command = fedmpi_command(ranks, {**settings(workload, data, device=device or "cpu"), **keys}, out)
        run_tree(command, out / "log.txt", {"OMP_NUM_THREADS": "1"}, REPOSITORY)
        lines.append(_line(name, read_records(out)[WARM_UP:]))
    return "\n".join(lines)


def _line(name: str, records: Sequence[dict[str, Any]]) -> str:
    phases = [_median([record["phase_seconds"].get(phase, 0.0) for record in records]) for phase in PHASES]
    busiest = [max(record["busy_seconds"]) for record in records]
    others = _median([record["seconds"] - busy for record, busy in zip(records, busiest, strict=True)])
    imbalance = statistics.median(_imbalance(record["busy_seconds"]) for record in records)
    ranks = range(len(records[0]["busy_seconds"]))
    per_rank = ", ".join(f"{_median([record['busy_seconds'][rank] for record in records]):.1f}" for rank in ranks)
    cells = [_median([record["seconds"] for record in records]), *phases, _median(busiest), others]
    return f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + f" | {imbalance:.2f} | {per_rank} |"


def _imbalance(busy: Sequence[float]) -> float:
    working = [seconds for seconds in busy if seconds > TRAINS_ABOVE * max(busy)]
    return max(working) * len(working) / sum(working)


def _median(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)
