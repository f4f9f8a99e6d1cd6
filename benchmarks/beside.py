"""Compare two variants in alternation: another copy of the repository, or other settings.

    python -m benchmarks.beside W1 W2 W3 S4 S6 --other ../fedmpi-before      this copy against that one
    python -m benchmarks.beside W1 W2 --set local.algorithm=scaffold         those settings against the workload's own
    python -m benchmarks.beside Residual lstm --other ../fedmpi-before       single models (`benchmarks.workloads`)

A pass runs both variants, in alternating order, and the ratio is taken within a pass. The output shows the median,
lowest and highest ratio of the passes. On a machine of varying speed the last column is more reliable. It is the ratio
of the fast rounds, the lowest tenth of all rounds of all passes, with a 95 % bootstrap interval (percentiles over
passes). W1 and W2 set the batched engine, so that both variants use the same one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.contestants import REPOSITORY, fedmpi_command, read_run, settings
from benchmarks.measure import in_turns, run_tree, spread, table
from benchmarks.workloads import MODELS, WARM_UP, WORKLOADS, Workload, prepare

Passes = Sequence[Sequence[list[float]]]
"""Seconds of the rounds: pass, variant, round."""
FAST = 0.1
"""Share of the rounds that count as fast."""


def measured(workload: Workload, asked: argparse.Namespace, folder: Path) -> Passes:
    """Return the seconds of the rounds of both variants, without warm-up rounds."""
    prepare(workload, folder / "data")
    engine = {"local.engine": "batched"} if workload.name in ("W1", "W2") else {}
    own = {**settings(workload, folder / "data"), **engine, **dict(word.split("=", 1) for word in asked.both)}
    other = {**own, **dict(word.split("=", 1) for word in asked.set)}

    def way(keys: dict[str, object], tree: Path) -> list[float]:
        out = Path(tempfile.mkdtemp(dir=folder))
        command = fedmpi_command(asked.ranks, keys, out)
        run_tree(command, out / "log.txt", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}, tree)
        seconds = [float(one) for one in read_run(out)["seconds"][WARM_UP:]]
        print(f"{workload.name}  {tree.name}  {1e3 * statistics.median(seconds):.1f} ms", file=sys.stderr, flush=True)
        return seconds

    return in_turns([lambda: way(own, REPOSITORY), lambda: way(other, asked.other or REPOSITORY)], asked.passes)


def fast_ratio(passes: Passes) -> float:
    """Return the ratio of the seconds of fast rounds: the quantile `FAST` of all rounds of each variant."""
    one, other = (np.quantile(np.concatenate(rounds), FAST) for rounds in zip(*passes, strict=True))
    return float(other / one)


def bootstrap(passes: Passes, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of `fast_ratio`: percentiles over passes resampled with replacement."""
    generator = np.random.default_rng(0)
    drawn = [fast_ratio([passes[i] for i in generator.integers(0, len(passes), len(passes))]) for _ in range(draws)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=[*WORKLOADS, *MODELS])
    parser.add_argument("--other", type=Path, help="another copy of the repository")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the other")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE", help="settings of both")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    rows = []
    for name in asked.workloads:
        with tempfile.TemporaryDirectory() as folder:
            passes = measured((WORKLOADS | MODELS)[name], asked, Path(folder))
        medians = [[1e3 * statistics.median(rounds) for rounds in one] for one in passes]
        one, other = (f"{statistics.median(column):.1f}" for column in zip(*medians, strict=True))
        low, high = bootstrap(passes)
        fast = f"{fast_ratio(passes):.3f} [{low:.3f}, {high:.3f}]"
        rows.append([name, one, other, spread([b / a for a, b in medians], 3), fast])
    what = str(asked.other or " ".join(asked.set))
    print(table([f"{asked.ranks} ranks", "this, ms", f"{what}, ms", "that / this", "fast rounds"], rows))


if __name__ == "__main__":
    main()
