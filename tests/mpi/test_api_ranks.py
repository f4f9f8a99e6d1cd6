"""fedmpi.run under mpiexec: every rank calls it.

`mpiexec -n 3 python -m tests.mpi.test_api_ranks FOLDER` writes what each rank found to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from data_prep.__main__ import run as prepare
from fedmpi.config import load_config
from fedmpi.core.experiment import facts_of_run
from fedmpi.data.opening import open_store
from tests.local.test_inputs import WORDS, Words, data
from tests.local.test_inputs import run as several
from tests.local.test_isolation import ON_RANKS, resumed, trained
from tests.mpi.differing import SCENARIOS, error_of
from tests.mpi.launch import run_mpi
from tests.quick_end import end_quickly
from tests.test_training_own_models import outcomes

KEYS = {"rounds": 3, "clients.count": 6, "server.exact": True, "cluster.reduction": "window", "model.hidden": [8]}
PATIENT = KEYS | {"rounds": 20, "local.lr": 0.5, "evaluation.patience": 2}
RANKS = 3
Found = list[dict[str, Any]]


def facts_of(run: fedmpi.Run) -> dict[str, Any]:
    values = b"".join(value.numpy().tobytes() for value in run.model.state_dict().values())
    best = b"".join(value.numpy().tobytes() for value in run.best_model.state_dict().values())
    return {
        "records": [{k: v for k, v in record.items() if "seconds" not in k} for record in run.records],
        "summary": [run.summary["final"], run.summary["wall_seconds"], run.ending, str(run.folder), crc32(values)],
        "best": [run.summary["best_round"], crc32(best)],
    }


def arrays(seed: int = 0) -> fedmpi.ClientArrays:
    x = np.random.default_rng(seed).integers(0, 256, (120, 1, 4, 4), np.uint8)
    return fedmpi.ClientArrays(x, np.arange(120) % 3, np.arange(120) % 7, test=(x[:30], np.arange(30) % 3))


def refusal(*given: Any, **more: Any) -> str:
    """The words of the error that the run raises here."""
    with pytest.raises((fedmpi.UserError, fedmpi.ComponentFailure)) as error:
        fedmpi.run(*given, **more)
    return str(error.value)


def fails(record: dict[str, Any]) -> bool:
    raise KeyError("a test fault")


def mapped_after_runs() -> list[int]:
    """Shared memory that this process maps, in pieces, after each of several runs: stars and mediators in turn."""
    found = []
    for seed in range(5):
        small = {"rounds": 1, "clients.count": 6, "model.hidden": [4], "model.name": "mlp", "seed": seed}
        fedmpi.run("astraea-mediator" if seed % 2 else "fedavg", small | {"cluster.reduction": "window"})
        found.append(len(re.findall("/dev/shm", Path("/proc/self/maps").read_text())))
    return found


def main() -> None:
    from mpi4py import MPI

    folder, rank, calls = Path(sys.argv[1]), MPI.COMM_WORLD.Get_rank(), list[int]()

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
        "too many": refusal("fedavg", {"clients.count": 99}, data=arrays()),
        "flipped": refusal("fedavg", {"data.verify": True}, data=str(folder / "flipped")),
        "taken": refusal("fedavg", KEYS, out=folder / "run"),
        "different arrays": refusal("fedavg", KEYS, data=arrays(rank)),
        "different networks": refusal("fedavg", {"rounds": 1}, data=arrays(), model=own),
        "patient": facts_of(fedmpi.run("fedavg", PATIENT)),
        "calls": calls,
        "own models": outcomes(),
        "several inputs": facts_of(several(Words, data(WORDS), {"server.exact": True})),
        "mapped": mapped_after_runs(),
        "isolated": {name: resumed(name, folder) for name in ON_RANKS},
        "differing": {name: error_of(name, rank) for name in SCENARIOS},
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    fedmpi.run("fedavg", {"rounds": 9}, stop=lambda: rank == 1 and bool(1 // 0))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of each of three ranks; in the end rank 1 fails alone, which ends the job."""
    folder = tmp_path_factory.mktemp("api")
    assert prepare(f"digits --partition iid --clients 6 --shards 3 --out {folder / 'flipped'}".split()) == 0
    with h5py.File(folder / "flipped" / "train-00001.h5", "r+") as opened:
        opened["x"][0] = 255 - opened["x"][0]
    job = run_mpi(RANKS, ["-m", "tests.mpi.test_api_ranks", folder])
    assert job.returncode != 0 and job.stdout == "", "a run prints nothing"
    assert job.stderr.count("Traceback") == 1 and "ZeroDivisionError" in job.stderr and "rank 1 on " in job.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_records_are_whole_on_rank_0_and_summary_and_model_everywhere(found: Found):
    for name, rounds in (("plain", 3), ("written", 3), ("ended", 2), ("stopped", 1)):
        server, *workers = (ranks[name] for ranks in found)
        assert server["records"] == found[0]["plain"]["records"][:rounds]
        assert workers == [{**server, "records": []}] * 2
        assert server["summary"][2] == (name if name in ("ended", "stopped") else "finished")
    assert found[0]["written"]["summary"][-1] == found[0]["plain"]["summary"][-1]
    assert Path(found[0]["written"]["summary"][3]).is_dir()
    assert [ranks["calls"] for ranks in found] == [[0, 1], [], []]


def test_patience_ends_after_the_same_round_with_the_same_best_model_as_on_one_rank(found: Found):
    alone = facts_of(fedmpi.run("fedavg", PATIENT | {"cluster.threads": 1}))
    assert [ranks["patient"]["best"] for ranks in found] == [alone["best"]] * RANKS
    assert len(found[0]["patient"]["records"]) == len(alone["records"]) < 20
    assert [ranks["patient"]["summary"][2] for ranks in found] == [alone["summary"][2]] * RANKS == ["ended"] * RANKS


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_that_differ_from_the_others_end_the_run_with_one_sentence_on_all_ranks(found: Found, name: str):
    one, *others = (ranks["differing"][name] for ranks in found)
    assert others == [one, one]
    _, _, kind, words = SCENARIOS[name]
    assert kind in one and re.search(words, one[kind]), one


def test_every_key_version_and_shard_is_among_the_facts_that_ranks_compare(tmp_path: Path):
    assert prepare(f"digits --partition iid --clients 6 --shards 2 --out {tmp_path / 'it'}".split()) == 0
    manifest = open_store(tmp_path / "it").manifest
    facts = facts_of_run(load_config(None, ["preset=fedavg", "local.lr=0.3"]), manifest)
    assert (facts["local.lr"], facts["fedmpi (version)"]) == ("0.3", fedmpi.__version__)
    assert {"torch (version)", "python (version)", "fedmpi's own sources (sha256)"} <= facts.keys()
    for file in manifest.files():
        assert facts[f"manifest.json, {file.name} (sha256)"] == file.sha256
    assert {f"manifest.json, {key}" for key in ("classes", "seed", "description")} <= facts.keys()


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("failed", "in round 0: KeyError: 'a test fault'"),
        ("too many", "clients.count = 99, but the data hold 7 clients"),
        ("flipped", "flipped/train-00001.h5"),
        ("taken", "run holds a run already"),
        ("different arrays", "the ranks differ: "),
        ("different networks", "the values of the model given (sha256)"),
    ],
)
def test_wrong_input_is_rejected_by_all_ranks_alike(found: Found, name: str, sentence: str):
    words = {ranks[name] for ranks in found}
    assert len(words) == 1 and sentence in words.pop()


def test_own_models_are_trained_and_rejected_as_on_one_rank(found: Found):
    alone = outcomes()
    assert [ranks["own models"] for ranks in found] == [alone] * 3
    assert [line.partition(":")[0] for line in alone[1:4]] == ["UserError"] * 3 and alone[5].startswith("Divergence")
    alone = facts_of(several(Words, data(WORDS), {"server.exact": True}))
    assert found[0]["several inputs"]["records"] == alone["records"]
    assert [ranks["several inputs"]["summary"][-1] for ranks in found] == [alone["summary"][-1]] * RANKS


def test_resumed_runs_of_modules_with_state_have_the_bits_of_one_rank(found: Found):
    assert found[0]["isolated"] == {name: trained(name) for name in ON_RANKS}


def test_windows_are_freed_after_every_run(found: Found):
    for ranks in found:
        assert len(set(ranks["mapped"][1:])) == 1, ranks["mapped"]


if __name__ == "__main__":
    end_quickly()
    main()
