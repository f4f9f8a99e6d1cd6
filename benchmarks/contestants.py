"""Contestants: the naive loop, fedmpi on 1, 2 and 3 ranks, and installed peers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.workloads import MODELS, Workload
from fedmpi import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
Result = dict[str, Any]
Module = Literal["layers", "own", "one by one"]
"""Form of the network: as layers that fedmpi can analyze, as a user's module, or as a module without merged clients."""


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    name: str
    command: Callable[[Path, Path], Sequence[str]]  # command(parent folder of shards, result folder) -> arguments
    read: Callable[[Path], Result]  # read(folder for results) -> seconds, samples and steps of every round
    environment: Mapping[str, str] = field(default_factory=dict)  # Variables added to the inherited ones


PEERS = {"pfl": (1, 2), "blazefl": (1, 2), "flwr": (2,), "fedjax": (1,)}
"""Installed package of each peer, driven by `benchmarks.peers.drive_NAME`, and the processes of each of its rows."""


def contestants(
    workload: Workload, quick: bool, pythons: Mapping[str, str], device: str | None = None
) -> list[Contestant]:
    """Return the contestants of a workload, the reference first; on a given device all of them use it."""
    place, ranks = device or "cpu", ((1, 2, 3) if device is None else (1, 2))
    if quick:
        ranks = (2,) if device is None else (1,)
    fedmpi_rows = [by_fedmpi(workload, n, device=place) for n in ranks]
    if workload.wanted:
        return fedmpi_rows
    rows = [by_naive(workload, quick, place), *fedmpi_rows]
    few = workload.task == "text" and not workload.each  # most clients take one step
    if quick:
        return rows
    if workload.own:
        rows += [by_fedmpi(workload, n, "own", place) for n in ranks if n != 2]
    if few or device is not None:
        rows += [by_fedmpi(workload, n, "one by one", place) for n in ranks if n != 2]
    # the drivers of the others stay on the CPU and know the networks of W1 to W3
    driven = ["pfl"] if device is not None or workload.name in MODELS else PEERS
    used = [(name, n) for name in driven if name in pythons for n in PEERS[name] if device is None or n == 1]
    return [*rows, *(by_peer(workload, name, pythons[name], n, quick, place) for name, n in used)]


def find_peers(given: Sequence[str]) -> dict[str, str]:
    """Return the Python of each available peer: the given ones, and those installed in this environment."""
    found = {name: sys.executable for name in PEERS if importlib.util.find_spec(name)}
    for text in given:
        name, _, python = text.partition("=")
        if name not in PEERS or not shutil.which(python):
            raise UserError(f"--peer {text}: write NAME=PYTHON, where NAME is one of {', '.join(PEERS)}.")
        found[name] = python
    return found


def by_naive(workload: Workload, quick: bool, device: str) -> Contestant:
    def command(data: Path, out: Path) -> list[str]:
        arguments = [workload.name, "--folder", str(data), "--out", str(out / "result.json"), "--device", device]
        return [sys.executable, "-m", "benchmarks.naive", *arguments, *(["--quick"] if quick else [])]

    return Contestant("naive", command, _read_result, {"OMP_NUM_THREADS": "1"})


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
    return Contestant(f"{name}, {processes} process(es)", command, _read_result, environment)


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
        "model": workload.model if module == "layers" else workload.own or workload.model,
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
    if ranks == 1:
        return train
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return [str(own) if own.exists() else "mpiexec", "-n", str(ranks), *train]


def by_fedmpi(workload: Workload, ranks: int, module: Module = "layers", device: str = "cpu") -> Contestant:
    kind = {"layers": "", "own": ", user's own module", "one by one": ", user's own module, one by one"}[module]
    return Contestant(
        f"fedmpi, {ranks} rank(s){kind}",
        lambda data, out: fedmpi_command(ranks, settings(workload, data, module, device), out),
        read_run,
        {"OMP_NUM_THREADS": "1"},
    )


def read_run(out: Path) -> Result:
    """Return the seconds, samples and steps of every round from a run's records, and the facts of its summary."""
    records = read_records(out)
    summary = json.loads((out / "run" / "summary.json").read_text())
    found: Result = {name: [record[name] for record in records] for name in ("seconds", "samples", "steps")}
    return {**found, "loss": [None, summary["final"].get("test_loss")]}


def read_records(out: Path) -> list[dict[str, Any]]:
    """Return the records of the run in `out`."""
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def versions(pythons: Mapping[str, str]) -> str:
    """Return the versions of all contestants that are installed."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    names = dict.fromkeys(("torch", "numpy", "mpi4py", "mpich"), sys.executable) | dict(pythons)
    found = ((name, subprocess.check_output([python, "-c", code, name], text=True)) for name, python in names.items())
    return ", ".join(f"{name} {version.strip()}" for name, version in found)
