"""The strata that FedSSO finds on MNIST, through the program's own path (paper: section 4.2, Figure 2):

    python -m benchmarks.fedsso_strata --raw FOLDER_OF_MNIST --out runs/fedsso-strata

Five partitions of each kind into 100 clients are prepared (of 600 images IID, 584 with one class, 586 with two), and
`fedmpi train` runs a round of the preset on each; the number of strata comes from the run's record. Clients that OPTICS
calls noise are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from fedmpi.data.opening import open_store

PARTITIONS = {
    "IID": ["--partition", "iid"],
    "one class": ["--partition", "shards", "--classes-per-client", "1"],
    "two classes": ["--partition", "shards", "--classes-per-client", "2"],
}


def prepare(folder: Path, raw: Path, partition: list[str], seed: int) -> None:
    """Write the shards unless they are there."""
    if not (folder / "manifest.json").exists():
        options = ["--raw", str(raw), *partition, "--clients", "100", "--seed", str(seed), "--out", str(folder)]
        subprocess.run([sys.executable, "-m", "data_prep", "mnist", *options], check=True, capture_output=True)


def strata(folder: Path, shards: Path, seed: int, hidden: str) -> list[int]:
    """Sizes of the strata of one round."""
    if not (folder / "summary.json").exists():
        settings = ["preset=fedsso", "rounds=1", "participation.noise=drop", f"data.shards={shards}", f"seed={seed}"]
        settings += [f"model.hidden={hidden}", "logging.tensorboard=false"]
        assignments = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "fedmpi", "train", *assignments, "--out", str(folder), "--resume"]
        subprocess.run(command, check=True, capture_output=True)
    return list(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["stratum_sizes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, required=True, help="folder of the official MNIST files")
    parser.add_argument("--out", type=Path, required=True, help="folder of shards and runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hidden", default="[200, 200]", help="hidden layers of the perceptron")
    asked = parser.parse_args()
    print("| partition | seed | strata found | label sets held by two clients or more | clients left out |")
    print("|---|---|---|---|---|")
    for name, partition in PARTITIONS.items():
        for seed in range(asked.seeds):
            kind = f"{name.replace(' ', '-').lower()}-{seed}"
            prepare(asked.out / "shards" / kind, asked.raw, partition, seed)
            found = strata(asked.out / f"{kind}-{asked.hidden}", asked.out / "shards" / kind, seed, asked.hidden)
            held = open_store(str(asked.out / "shards" / kind)).class_counts() > 0
            sets = Counter(tuple(np.flatnonzero(client)) for client in held)
            shared = sum(count >= 2 for count in sets.values())
            print(f"| {name} | {seed} | {len(found)} | {shared} | {100 - sum(found)} |", flush=True)


if __name__ == "__main__":
    main()
