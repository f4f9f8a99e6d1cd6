"""Plot of the clients' models after one step, with the clusters that FedSSO finds among them (paper: Figure 2):

    fedmpi sweep jobs/experiments/fedsso-fig2.toml --out runs/fedsso-fig2
    python -m benchmarks.studies.fedsso_strata runs/fedsso-fig2/*/ --plot fedsso-fig2.png

Every folder is a run of the preset whose strata are made by OPTICS. Its clients are probed once more, as in the run
before round 0, and clustered. The output shows the recorded strata, the clusters found now, the label sets shared by
two clients or more, and the clients in no cluster. If clusters are faint, the rounding of another version or machine
changes them. The plane is that of the first two principal components of the models (of the random projection, if the
run clusters one).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import table
from fedmpi.clients.stratifier import DROPPED, optics
from fedmpi.common.types import Floats, Ints
from fedmpi.config import load_config
from fedmpi.config.tables import stratification
from fedmpi.core.experiment import Experiment

COLUMNS = 3
GREY = "0.75"


class Found(NamedTuple):
    """Clusters of one run's clients."""

    name: str
    recorded: int  # Strata in the run's records
    labels: Ints  # (N,): Cluster of every client; −1 in none
    plane: Floats  # (N, 2)
    shared_sets: int  # Label sets shared by two clients or more
    clusters: int
    alone: int  # Clients in no cluster


def look(folder: Path) -> Found:
    """Probe and cluster the clients of a run as before its first round."""
    config = load_config(folder / "config.toml")
    experiment = Experiment.connect(config)
    stratifier, clustering = experiment.decisions.stratifier, stratification(config).clustering
    clients = np.arange(stratifier.clients, dtype=np.int64)
    probes = stratifier.probe(0, experiment.model.initial, clients)
    matrix = stratifier.transform.features(probes).matrix
    labels = optics(matrix, clustering.min_samples, clustering.xi)
    recorded = int(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["strata"])
    held = stratifier.class_counts(clients) > 0
    experiment.close()
    sets = Counter(map(bytes, held))
    shared, clusters, alone = (
        sum(count > 1 for count in sets.values()),
        int(labels.max(initial=-1)) + 1,
        labels == DROPPED,
    )
    return Found(folder.resolve().name, recorded, labels, plane(matrix), shared, clusters, int(alone.sum()))


def plane(matrix: NDArray[np.float32]) -> Floats:
    """Return the first two principal components of the rows (N, width), (N, 2), by the rows' inner products (N, N)."""
    centred = matrix.astype(np.float64) - matrix.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred @ centred.T)
    return np.asarray(vectors[:, [-1, -2]] * np.sqrt(np.maximum(values[[-1, -2]], 0)))


def draw(found: list[Found], path: Path) -> None:
    """Draw one panel per run; clients in no cluster are grey crosses."""
    from matplotlib.figure import Figure

    rows = -(-len(found) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, one in zip(panels, found, strict=False):
        alone = one.labels == DROPPED
        axes.scatter(*one.plane[alone].T, color=GREY, marker="x", s=18, linewidths=0.8)
        axes.scatter(*one.plane[~alone].T, c=one.labels[~alone], cmap="turbo", s=18, alpha=0.8, linewidths=0)
        plural = "" if one.clusters == 1 else "s"
        axes.set_title(f"{one.name}: {one.clusters} cluster{plural}, {one.alone} alone", fontsize="small")
        axes.tick_params(labelsize="x-small")
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--plot", type=Path, help="draw the models in the plane")
    asked = parser.parse_args()
    folders = [folder for folder in asked.runs if (folder / "metrics.jsonl").exists()]
    if not folders:
        parser.error("no folder holds a run: start the sweep first")
    found = [look(folder) for folder in folders]
    heads = ("run", "strata recorded", "clusters now", "label sets of two clients or more", "clients alone")
    print(table(heads, ([one.name, one.recorded, one.clusters, one.shared_sets, one.alone] for one in found)))
    if asked.plot is not None:
        draw(found, asked.plot)


if __name__ == "__main__":
    main()
