"""Bit-for-bit comparison of every preset's records and final model before and after a change of the code.

    python -m benchmarks.golden record golden/before          runs every preset on 1 and on 3 ranks
    python -m benchmarks.golden record golden/after --against golden/before
    python -m benchmarks.golden compare golden/before golden/after

The tested version is the `fedmpi` that Python imports; PYTHONPATH can select another copy of the repository. The engine
is set by name, since the engine benchmark may choose differently. One process uses the sequential engine; several use
the stacked one, or the merged one if rows are sampled. Records are compared without their seconds, models bit by bit.
The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedmpi import presets
from fedmpi.config import Preset
from fedmpi.config.loading import dotted

ROUNDS = 4
RANKS = (1, 3)
STRATA = {"clients.sampler.strata": 4, "clients.count": 5}
MEDIATORS = {"clients.count": 10, "topology.clients_per_mediator": 5}
SMALL: dict[str, dict[str, Any]] = {
    "astraea": MEDIATORS,
    "astraea-aug": {"clients.count": 10},
    "astraea-mediator": MEDIATORS,
    "centralized": {"samples.budget": 256},
    "fedbuff": {"topology.in_flight": 10},
    "fedsampling": {"samples.budget": 256, "samples.size.max_size": 150},
    "fedsampling-naive": {"samples.sampler.ratio": 0.2},
    "fedstas": STRATA,
    "fedstas-dp": STRATA,
    "fedsts": STRATA,
}
"""Presets run with the papers' values instead of those for the digits, except what 20 clients need smaller."""
SEQUENTIAL = ("ditto", "fedrep", "per-fedavg", "fedbn", "ifca")


def engine(preset: Preset, ranks: int) -> str:
    """Return the engine that trains a preset's run."""
    if preset.table.get("topology", {}).get("name") == "mediators" or preset.name in SEQUENTIAL:
        return "auto"  # only one engine can train it
    return "sequential" if ranks == 1 else "batched"


def papers_values(preset: Preset) -> dict[str, Any]:
    """Return the papers' values of the keys that the preset's table for the digits replaces."""
    table = dotted(preset.table)
    return {key: table[key] for key in dotted(preset.digits) if key in table}


def record(folder: Path, only: list[str]) -> int:
    """Run the presets into `folder` and return the number of failures."""
    failed = 0
    for preset in presets():
        for ranks in RANKS:
            if only and preset.name not in only:
                continue
            out = folder / f"{preset.name}-{ranks}"
            if (out / "summary.json").exists():
                continue
            launcher = [str(Path(sys.prefix) / "bin" / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
            settings = dotted(papers_values(preset)) | SMALL.get(preset.name, {})
            settings |= {"preset": preset.name, "rounds": ROUNDS, "checkpoint.every": 2, "logging.tensorboard": "false"}
            settings["local.engine"] = engine(preset, ranks)
            words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
            command = [sys.executable, "-m", "fedmpi", "train", *words, "--out", str(out)]
            done = subprocess.run([*launcher, *command], capture_output=True, text=True)
            if done.returncode:
                failed += 1
                print(f"{out.name}: exit code {done.returncode}: {done.stderr.strip()[-300:]}", flush=True)
    return failed


def untimed(record: Any) -> Any:
    """Return a record without its measured seconds."""
    if not isinstance(record, dict):
        return record
    return {key: untimed(value) for key, value in record.items() if "seconds" not in key or key == "virtual_seconds"}


def differences(one: Path, other: Path) -> list[str]:
    """List the differences between two runs: the first round with another record, and the model."""
    found = []
    records = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (one, other)]
    for a, b in zip(*records, strict=False):
        if untimed(a) != untimed(b):
            a, b = untimed(a), untimed(b)
            keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
            found.append(f"round {a['round']} differs in {', '.join(keys)}")
            break
    if len(records[0]) != len(records[1]):
        found.append(f"{len(records[0])} and {len(records[1])} rounds")
    digests = [hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() for run in (one, other)]
    if digests[0] != digests[1]:
        found.append("another model")
    return found


def compare(before: Path, after: Path) -> int:
    """Print the differences run by run; return how many runs differ or are missing."""
    wrong = 0
    names = sorted(run.name for run in before.iterdir() if (run / "summary.json").exists())
    for name in names:
        there = (after / name / "summary.json").exists()
        found = differences(before / name, after / name) if there else ["was not run"]
        wrong += bool(found)
        if found:
            print(f"{name}: {'; '.join(found)}")
    print(f"{len(names) - wrong} of {len(names)} runs have the same records and the same model")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run every preset")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", nargs="*", default=[], metavar="PRESET")
    recording.add_argument("--against", type=Path, metavar="FOLDER", help="compare with these runs afterwards")
    comparing = actions.add_parser("compare", help="compare two recorded folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.action == "compare":
        return int(compare(asked.before, asked.after) > 0)
    failed = record(asked.folder, asked.only)
    return int(failed + (compare(asked.against, asked.folder) if asked.against else 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
