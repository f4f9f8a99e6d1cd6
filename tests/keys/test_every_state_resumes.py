"""All state between rounds is in the checkpoints: a stopped and resumed run is bit-identical to an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.in_process import run_into
from tests.keys.entries import ALL, NOISED, PRIVATE, SOME, STRATA, S
from tests.keys.watched import QUIET, TIMED

STATES = {
    "strata made once": (f"{STRATA} clients.sampler.refresh=0", {"strata.labels", "strata.spreads", "strata.norms"}),
    "features of clients that are not measured again": (
        f"{STRATA} clients.sampler.refresh_clients=selected",
        {"strata.features", "strata.feature_norms", "strata.latest"},
    ),
    "strata that a refresh is not yet due for": (f"{STRATA} clients.sampler.refresh=3", {"strata.labels"}),
    "what the server's Adam remembers": (
        f"{SOME} server.optimizer=adam server.optimizer.lr=0.02",
        {"server.m", "server.v"},
    ),
    "answers that were given, and sizes that were reported": (
        f"{PRIVATE} server.weights=samples",
        {"ledger.answers", "ledger.exposed"},
    ),
    "answers that are repeated": (f"{PRIVATE} samples.size.reuse_reports=true", {"ledger.answers"}),
    "noise that was charged": (f"{NOISED} privacy.noise_multiplier=1", {"accountant."}),
    "who was used how often": (
        f"{SOME} samples.sampler=bernoulli samples.budget=100 logging.diagnostics=true",
        {"usage.clients", "usage.samples"},
    ),
    "who was used how often, beside the clients' scores": (
        f"{SOME} evaluation.clients=all evaluation.clients_every=2",
        {"clients_view.used"},
    ),
    "losses of past rounds": (
        f"{S} clients.sampler=oort clients.count=4 clients.sampler.explore=0.5 clients.sampler.explore_least=0",
        {"numbers."},
    ),
    "corrections of clients and server": (f"{SOME} local.algorithm=scaffold", {"algorithm."}),
    "what transport lost": (
        f"{ALL} compression=top-k compression.fraction=0.1 compression.error_feedback=true",
        {"transport."},
    ),
    "groups made once": (
        f"{ALL} topology=mediators topology.regroup=once topology.clients_per_mediator=3 "
        "topology.scheduling=random clients.availability=bernoulli clients.availability.probability=0.7",
        set(),
    ),
    "the best round and the bytes so far": (
        f"{SOME} local.lr=0.5 evaluation.every=2 evaluation.target_accuracy=0.1",
        set(),
    ),
}


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, torch.Tensor]]:
    """Records and summary without what is timed, and the final model."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.pop("wall_seconds") > 0
    return records, summary, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", STATES)
def test_a_resumed_run_remembers(name: str, tmp_path: Path):
    settings, tensors = f"{QUIET} rounds=5 {STATES[name][0]}".split(), STATES[name][1]
    run_into(tmp_path / "whole", *settings)
    assert run_into(tmp_path / "cut", *settings, stop_after=2) == 75
    (saved,) = (tmp_path / "cut" / "checkpoints").glob("round-*.safetensors")
    held = load_file(saved)
    assert not [start for start in tensors if not any(key.startswith(start) for key in held)], sorted(held)
    run_into(tmp_path / "cut", *settings, resume=True)
    whole, cut = left(tmp_path / "whole"), left(tmp_path / "cut")
    assert len(whole[0]) == 5
    assert whole[0] == cut[0] and whole[1] == cut[1]
    assert all(np.array_equal(value, cut[2][key]) for key, value in whole[2].items())
