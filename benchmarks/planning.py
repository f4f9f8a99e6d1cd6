"""Cost of planning a round on one core, from a thousand clients to a million:

    OMP_NUM_THREADS=1 python -m benchmarks.planning --plot planning.png

Every row is the median of some rounds of the real planner: the cohort, the size query of all clients with its estimate,
the coefficients, the privacy ledger and the facts of the record. For Bernoulli sampling it includes drawing all
samples.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.core.plan import Planner
from fedmpi.samples.built_in_rules import bernoulli_rows

SYSTEMS = {
    "uniform, 1 %": ["clients.sampler=uniform", "clients.fraction=0.01"],
    "weighted by size, with replacement": ["clients.sampler=weighted", "clients.fraction=0.01"],
    "weighted by size, without replacement": [
        "clients.sampler=weighted",
        "clients.fraction=0.01",
        "clients.sampler.replace=false",
    ],
    "randomized response of all, Bernoulli rows": ["preset=fedsampling", "samples.budget=2048"],
    "Duchi's answers of all, Bernoulli rows": [
        "preset=fedsampling",
        "samples.budget=2048",
        "samples.size.estimate=duchi",
    ],
    "piecewise answers of all, Bernoulli rows": [
        "preset=fedsampling",
        "samples.budget=2048",
        "samples.size.estimate=piecewise",
    ],
    "everybody available by chance, drop-outs": [
        "preset=fedavg",
        "clients.availability=bernoulli",
        "clients.availability.probability=0.5",
        "clients.failure_rate=0.1",
    ],
}


def seconds_of_a_round(settings: list[str], clients: int, rounds: int) -> float:
    """Return the median seconds of planning, after a first round that allocates reused memory."""
    config, streams = load_config(None, settings), Streams(0)
    sizes = 1 + streams.generator(Purpose.PARTITION).poisson(20, clients).astype(np.int64)
    planner = Planner(config, sizes, streams, CohortDraw(config, sizes, None, streams, values=40_000))
    measured = []
    for t in range(rounds + 1):
        started = time.perf_counter()
        plan = planner.plan(t)
        if config.samples.sampler.name == "bernoulli":
            bernoulli_rows(streams, t, sizes[plan.clients], plan.probability)
        measured.append(time.perf_counter() - started)
    return float(np.median(measured[1:]))


def plot(numbers: list[int], costs: dict[str, list[float]], path: Path) -> None:
    """Draw seconds against clients, both logarithmic, with a line proportional to the number of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, seconds in costs.items():
        axes.plot(numbers, seconds, marker="o", markersize=3, label=name)
    axes.plot(numbers, [n * 1e-7 for n in numbers], color="grey", linestyle=":", label="proportional")
    axes.set(xlabel="clients", ylabel="seconds of planning a round", xscale="log", yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds measured of each")
    parser.add_argument("--most", type=int, default=1_000_000, help="largest number of clients")
    parser.add_argument("--plot", type=Path, help="draw the curves")
    asked = parser.parse_args()
    numbers = [n for n in (10**3, 10**4, 10**5, 10**6, 10**7) if n <= asked.most]
    print(f"| milliseconds a round | {' | '.join(f'{n:,} clients' for n in numbers)} | slope |")
    print(f"|---|{'---:|' * (len(numbers) + 1)}")
    costs = {}
    for name, settings in SYSTEMS.items():
        costs[name] = row = [seconds_of_a_round(settings, n, asked.rounds) for n in numbers]
        slope = np.log10(row[-1] / row[-2]) if len(row) > 1 else float("nan")
        print(f"| {name} | {' | '.join(f'{1000 * cost:.2f}' for cost in row)} | {slope:.2f} |", flush=True)
    if asked.plot is not None:
        plot(numbers, costs, asked.plot)


if __name__ == "__main__":
    main()
