"""Contestants: the naive loop, the hand-written floors, fedmpi on 1, 2 and 3 ranks, and installed peers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.workloads import Workload
from fedmpi import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
Result = dict[str, Any]
Module = Literal["layers", "own", "one by one"]
"""Form of the network: as layers that fedmpi can analyse, as a user's module, or as a module without merged clients."""


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    name: str
    command: Callable[[Path, Path], Sequence[str]]  # command(parent folder of shards, result folder) -> arguments
    read: Callable[[Path], Result]  # read(folder for results) -> seconds, samples and steps of every round
    environment: Mapping[str, str] = field(default_factory=dict)  # Variables added to the inherited ones


@dataclass(frozen=True)
class Peer:
    """Another simulator; `benchmarks.peers.drive_NAME` drives it, NAME being the package it installs."""

    distribution: str  # Name on PyPI
    processes: tuple[int, ...]  # Processes of each of its rows, as far as it can use them


ON_DEVICES = ("pfl",)
"""Peers whose drivers use a GPU if one is available; the others stay on the CPU."""
PEERS = {
    "pfl": Peer("pfl", (1, 2)),
    "blazefl": Peer("blazefl", (1, 2)),
    "flwr": Peer("flwr", (2,)),
    "fluke": Peer("fluke-fl", (1,)),
    "fedlab": Peer("fedlab", (1,)),
    "appfl": Peer("appfl", (1,)),
    "fedjax": Peer("fedjax", (1,)),
}


def contestants(
    workload: Workload, quick: bool, pythons: Mapping[str, str], device: str | None = None
) -> list[Contestant]:
    """Return the contestants of a workload, the reference first."""
    if device is not None:
        return _on_device(workload, quick, pythons, device)
    if workload.wanted:
        counts = (1, 2)[: 1 if quick else 2]
        rows = [by_floor(workload, "gradient", n, quick) for n in counts]
        return [*rows, *(by_fedmpi(workload, ranks) for ranks in ((2,) if quick else (1, 2, 3)))]
    best = "stacked" if workload.task == "image" else "merged"
    rows = [by_floor(workload, "naive", 1, quick)]
    if quick:
        return [*rows, by_floor(workload, best, 1, quick), by_fedmpi(workload, 2)]
    rows += [by_floor(workload, variant, n, quick) for variant in ("tight", best) for n in (1, 2)]
    rows += [by_fedmpi(workload, ranks) for ranks in (1, 2, 3)]
    rows += [by_fedmpi(workload, ranks, "own") for ranks in (1, 3)]
    if workload.task == "text":  # only here do clients take a single step; other workloads already train sequentially
        rows += [by_fedmpi(workload, ranks, "one by one") for ranks in (1, 3)]
    driven = {name: peer for name, peer in PEERS.items() if name in pythons}
    return [
        *rows,
        *(by_peer(workload, name, pythons[name], n) for name, peer in driven.items() for n in peer.processes),
    ]


def _on_device(workload: Workload, quick: bool, pythons: Mapping[str, str], device: str) -> list[Contestant]:
    floors = ["gradient"] if workload.wanted else ["naive", "tight", *(["merged"] if workload.task == "text" else [])]
    rows = [by_floor(workload, variant, 1, quick, device) for variant in floors]
    rows += [by_fedmpi(workload, ranks, device=device) for ranks in ((1,) if quick else (1, 2))]
    if workload.wanted:
        return rows
    rows += [by_fedmpi(workload, 1, "one by one", device)]
    present = [name for name in ON_DEVICES if name in pythons]
    return [*rows, *(by_peer(workload, name, pythons[name], 1, quick, device) for name in present)]


def find_peers(given: Sequence[str], known: Collection[str] = PEERS.keys()) -> dict[str, str]:
    """Return the Python of each available peer: the given ones, and those installed in this environment."""
    here = {name: sys.executable for name in known if importlib.util.find_spec(name)}
    return {**here, **dict(_given_peer(text, known) for text in given)}


def _given_peer(text: str, known: Collection[str]) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in known or not python:
        raise UserError(f"--peer {text}: write NAME=PYTHON, where NAME is one of {', '.join(known)}.")
    tried = [python, "-c", f"import benchmarks.peers.drive_{name}"]
    try:
        done = subprocess.run(tried, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        missing = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except OSError as error:
        missing = [str(error)]
    if missing:
        raise UserError(
            f"--peer {text}: it cannot be driven there: {missing[0]} (benchmarks/README.md says what drivers need)."
        )
    return name, python


def by_floor(workload: Workload, variant: str, processes: int, quick: bool, device: str = "cpu") -> Contestant:
    def command(data: Path, out: Path) -> list[str]:
        arguments = [workload.name, variant, "--processes", str(processes), "--folder", str(data)]
        arguments += ["--out", str(out / "result.json"), "--device", device, *(["--quick"] if quick else [])]
        return [sys.executable, "-m", "benchmarks.floors", *arguments]

    return Contestant(f"{variant}, {_processes(processes)}", command, _read_result, {"OMP_NUM_THREADS": "1"})


def by_peer(
    workload: Workload, name: str, python: str, processes: int, quick: bool = False, device: str = "cpu"
) -> Contestant:
    def command(data: Path, out: Path) -> list[str]:
        driver = f"benchmarks.peers.drive_{name}"
        arguments = [workload.name, "--processes", str(processes), "--folder", str(data)]
        start = [python, "-m"]
        if name == "pfl" and processes > 1:
            start = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
            start += ["--master-addr", "127.0.0.1", "--master-port", "29533", "-m"]
        return [*start, driver, *arguments, "--out", str(out / "result.json"), *(["--quick"] if quick else [])]

    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a peer that sees a GPU uses it
    return Contestant(f"{name}, {_processes(processes)}", command, _read_result, environment)


def _processes(count: int) -> str:
    return f"{count} process" + ("es" if count > 1 else "")


def _read_result(out: Path) -> Result:
    result: Result = json.loads((out / "result.json").read_text())
    return result


def settings(workload: Workload, data: Path, module: Module = "layers", device: str = "cpu") -> dict[str, Any]:
    """Return the keys of fedmpi's configuration for the workload, evaluated once at the end as by the peers."""
    home = data / f"{workload.name}-{workload.clients}"
    chosen = {
        "preset": "fedsampling" if workload.wanted else "fedavg",
        "rounds": workload.rounds,
        "data.source": home,
        "model": workload.model_name(own=module != "layers"),
        "evaluation.every": 10**6,
        "checkpoint.every": 0,
        "logging.tensorboard": "false",
        "cluster.device": device,
    }
    if workload.wanted:
        # A large ε, so that every round samples about K; the cost of the size reports does not depend on it.
        return {
            **chosen,
            "samples.budget": workload.wanted,
            "samples.size.epsilon": 12,
            "server.optimizer.lr": workload.lr,
        }
    averaging = {"clients.count": workload.cohort, "local.batch_size": workload.batch, "local.lr": workload.lr}
    averaging["local.epochs"] = workload.epochs
    return {**chosen, **averaging, **({"local.engine": "sequential"} if module == "one by one" else {})}


def fedmpi_command(ranks: int, keys: Mapping[str, Any], out: Path) -> list[str]:
    """Return the command `fedmpi train` with these keys, under mpiexec for several ranks."""
    train = [sys.executable, "-m", "fedmpi", "train", "--out", str(out / "run")]
    for key, value in keys.items():
        train += ["--set", f"{key}={value}"]
    return train if ranks == 1 else [find_mpiexec(), "-n", str(ranks), *train]


def find_mpiexec() -> str:
    """Return the mpiexec of this environment, else the one on the PATH."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec: pip install 'fedmpi[mpi]'")
    return found


def by_fedmpi(workload: Workload, ranks: int, module: Module = "layers", device: str = "cpu") -> Contestant:
    kind = {"layers": "", "own": ", user's own module", "one by one": ", user's own module, one by one"}[module]
    name = f"fedmpi, {ranks} rank" + ("s" if ranks > 1 else "") + kind
    return Contestant(
        name,
        lambda data, out: fedmpi_command(ranks, settings(workload, data, module, device), out),
        read_run,
        {"OMP_NUM_THREADS": "1"},
    )


def read_run(out: Path) -> Result:
    """Return the seconds, samples and steps of every round from a run's records, and the facts of its summary."""
    records = read_records(out)
    summary = json.loads((out / "run" / "summary.json").read_text())
    return {
        "seconds": [record["seconds"] for record in records],
        "samples": [record["samples"] for record in records],
        "steps": [record["steps"] for record in records],
        "loss": [None, summary["final"].get("test_loss")],
    }


def read_records(out: Path) -> list[dict[str, Any]]:
    """Return the records of the run in `out`."""
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def versions(pythons: Mapping[str, str]) -> list[str]:
    """Return the versions of all contestants, as name and number; missing peers are listed as absent."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    lines = [f"{name} {_version(sys.executable, code, name)}" for name in ("torch", "numpy", "mpi4py", "mpich")]
    for name, peer in PEERS.items():
        found = _version(pythons[name], code, peer.distribution) if name in pythons else "absent"
        lines.append(f"{name} {found}")
    return lines


def _version(python: str, code: str, name: str) -> str:
    found = subprocess.run([python, "-c", code, name], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "absent"
