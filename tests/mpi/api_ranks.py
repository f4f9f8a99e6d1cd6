"""A program for tests of fedmpi.run on several ranks: every rank writes what it found.

mpiexec -n N python tests/mpi/api_ranks.py FOLDER           all checks, FOLDER/RANK.json
mpiexec -n N python tests/mpi/api_ranks.py FOLDER lone      rank 1 alone fails within a run
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import fedmpi
from tests.quick_end import end_quickly

KEYS = {
    "rounds": 3,
    "clients.count": 6,
    "server.exact": True,
    "cluster.reduction": "window",
    "model.hidden": [8],
}
RUNS_IN_A_ROW = 5


def bits(module: nn.Module) -> int:
    """A checksum of all values."""
    return crc32(b"".join(value.numpy().tobytes() for value in module.state_dict().values()))


def facts_of(run: fedmpi.Run) -> dict[str, Any]:
    records = [{k: v for k, v in record.items() if "seconds" not in k} for record in run.records]
    return {
        "records": records,
        "final": run.summary["final"],
        "seconds": run.summary["wall_seconds"],
        "model": bits(run.model),
        "ending": run.ending,
        "folder": str(run.folder),
    }


def arrays(seed: int = 0) -> fedmpi.ClientArrays:
    generator = np.random.default_rng(seed)
    x = generator.integers(0, 256, (120, 1, 4, 4), np.uint8)
    return fedmpi.ClientArrays(x, np.arange(120) % 3, np.arange(120) % 7, test=(x[:30], np.arange(30) % 3))


def refusal(*given: Any, **more: Any) -> str:
    """The words of the UserError or ComponentFailure that the run raises here."""
    try:
        fedmpi.run(*given, **more)
    except (fedmpi.UserError, fedmpi.ComponentFailure) as error:
        return str(error)
    raise AssertionError("nothing was rejected")


def fails(record: dict[str, Any]) -> bool:
    raise KeyError("a test fault")


def mapped() -> int:
    """Shared memory that this process maps, in pieces."""
    return len(re.findall("/dev/shm", Path("/proc/self/maps").read_text()))


def many(rank: int) -> list[int]:
    """Shared memory after each of several runs, stars and mediators in turn."""
    held = []
    for seed in range(RUNS_IN_A_ROW):
        preset = "astraea-mediator" if seed % 2 else "fedavg"
        small = {"rounds": 1, "clients.count": 6, "model.hidden": [4], "model.name": "mlp", "seed": seed}
        fedmpi.run(preset, small | {"cluster.reduction": "window"})
        held.append(mapped())
    return held


def main() -> None:
    folder, rank = Path(sys.argv[1]), MPI.COMM_WORLD.Get_rank()
    if sys.argv[2:] == ["lone"]:
        fedmpi.run("fedavg", KEYS, stop=(lambda: 1 // 0) if rank == 1 else None)
        raise AssertionError("continues without rank 1")
    calls: list[int] = []

    def enough(record: dict[str, Any]) -> bool:
        calls.append(record["round"])
        return bool(record["test_accuracy"] > 0 and record["round"] == 1)

    torch.manual_seed(rank)
    own = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    found = {
        "plain": facts_of(fedmpi.run("fedavg", KEYS)),
        "written": facts_of(fedmpi.run("fedavg", KEYS, out=folder / "run")),
        "ended": facts_of(fedmpi.run("fedavg", KEYS, on_round=enough if rank == 0 else None)),
        "stopped": facts_of(fedmpi.run("fedavg", KEYS, stop=(lambda: True) if rank == 2 else None)),
        "failed": refusal("fedavg", KEYS, on_round=fails),
        "wrong": refusal("fedavg", {"local.lrr": 1}),
        "too many": refusal("fedavg", {"clients.count": 99}, data=arrays()),
        "nowhere": refusal("fedavg", data="nowhere"),
        "arrays": facts_of(fedmpi.run("fedavg", {**KEYS, "clients.count": 4}, data=arrays())),
        "different arrays": refusal("fedavg", KEYS, data=arrays(rank)),
        "different networks": refusal("fedavg", {"rounds": 1}, data=arrays(), model=own),
        "calls": calls,
        "many": many(rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    end_quickly()
    main()
