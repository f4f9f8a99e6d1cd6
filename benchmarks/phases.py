"""Time of fedmpi's rounds, by phase and by rank, as Markdown:

    python -m benchmarks.phases            W1, W2, W3, S4, S6
    python -m benchmarks.phases W1 lstm

`load` and `train` are the slowest rank's. `others` is the rest of the round after the busiest rank's work: the plan,
the sum, the server's step, and waiting for all of these without spinning. Imbalance is the busiest rank's work over the
mean of those that train. On a given `--device` only the first two variants are run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import title
from benchmarks.contestants import REPOSITORY, fedmpi_command, read_records, settings
from benchmarks.measure import run_tree, table
from benchmarks.workloads import MODELS, QUICK, WARM_UP, WORKLOADS, prepare

PHASES = ("plan", "load", "train", "reduce", "apply", "evaluate")
HEADS = ("", "round", *PHASES, "busiest rank", "others", "imbalance", "busy per rank")
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks, rank 0 serves": (2, {"cluster.server_trains": "never"}),
    "2 ranks, all train": (2, {"cluster.server_trains": "always"}),
    "3 ranks": (3, {}),
    "3 ranks, data stays with its owner": (3, {"cluster.placement": "owner"}),
    "3 ranks, evaluated every round": (3, {"evaluation.every": 1}),
}
TRAINS_ABOVE = 0.25
"""Share of the busiest rank's work above which a rank counts as training; planning and evaluating are below."""


def line(name: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the median milliseconds of every phase of a round."""
    busy = [record["busy_seconds"] for record in records]
    columns = [[record["seconds"] for record in records]]
    columns += [[record["phase_seconds"].get(phase, 0.0) for record in records] for phase in PHASES]
    columns += [[max(one) for one in busy]]
    columns += [[record["seconds"] - max(one) for record, one in zip(records, busy, strict=True)]]
    working = [[seconds for seconds in one if seconds > TRAINS_ABOVE * max(one)] for one in busy]
    imbalance = statistics.median(max(one) * len(one) / sum(one) for one in working)
    per_rank = ", ".join(f"{1e3 * statistics.median(one):.1f}" for one in zip(*busy, strict=True))
    return [name, *(f"{1e3 * statistics.median(one):.1f}" for one in columns), f"{imbalance:.2f}", per_rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS, *MODELS], metavar="WORKLOAD")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--device", help="where fedmpi computes, e.g. cuda; by default on the CPU")
    asked = parser.parse_args()
    chosen = QUICK if asked.quick else WORKLOADS | MODELS
    variants = list(VARIANTS.items())[: None if asked.device is None else 2]
    for name in asked.workloads or (list(WORKLOADS) if not asked.quick else list(QUICK)):
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            prepare(chosen[name], Path(folder))
            for label, (ranks, keys) in variants:
                out = Path(tempfile.mkdtemp(dir=folder))
                keys = {**settings(chosen[name], Path(folder), device=asked.device or "cpu"), **keys}
                run_tree(fedmpi_command(ranks, keys, out), out / "log.txt", {"OMP_NUM_THREADS": "1"}, REPOSITORY)
                rows.append(line(label, read_records(out)[WARM_UP:]))
        print(f"### {title(chosen[name])}: milliseconds per round\n\n{table(HEADS, rows)}\n", flush=True)


if __name__ == "__main__":
    main()
