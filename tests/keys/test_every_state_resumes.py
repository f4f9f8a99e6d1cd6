"""All state between rounds is in the checkpoints: a stopped and resumed run is bit-identical to an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedmpi
from tests.end_to_end.in_process import run_into
from tests.keys.worlds import ALL, NOISED, PRIVATE, QUIET, SOME, STRATA, S, observations

STATES = {
    "strata made once": f"{STRATA} clients.sampler.refresh=0",
    "features of clients that are not measured again": f"{STRATA} clients.sampler.refresh_clients=selected",
    "strata that a refresh is not yet due for": f"{STRATA} clients.sampler.refresh=3",
    "moments of the server's Adam": f"{SOME} server.optimizer=adam server.optimizer.lr=0.02",
    "size reports": f"{PRIVATE} server.weights=samples",
    "reports that are repeated": f"{PRIVATE} samples.size.reuse_reports=true",
    "privacy spent": f"{NOISED} privacy.noise_multiplier=1",
    "an adaptive clipping norm": f"{NOISED} privacy.noise_multiplier=0.1 privacy.adaptive_clip=true",
    "the tree of the noise": (
        f"{S} clients.sampler=shuffled clients.count=3 server.weights=uniform privacy.clip_norm=0.1 "
        "privacy.noise_multiplier=1 privacy.noise=tree"
    ),
    "use of clients and samples": f"{SOME} samples.sampler=bernoulli samples.budget=100 logging.diagnostics=true",
    "use of clients in their view": f"{SOME} evaluation.clients=all evaluation.clients_every=2",
    "losses of past rounds": (
        f"{S} clients.sampler=oort-loss clients.count=4 clients.sampler.explore=0.5 clients.sampler.explore_least=0"
    ),
    "speeds, and how often clients were selected": (
        f"{S} clients.sampler=oort devices=true clients.count=4 clients.sampler.window=1 "
        "clients.sampler.exclude_after=2"
    ),
    "sketches of measured updates": f"{S} clients.sampler=divfl clients.count=2",
    "changes of losses": f"{S} clients.sampler=fedcor clients.count=4 clients.sampler.warmup=3",
    "feedback of independent draws": f"{S} clients.sampler=k-vib clients.count=6 clients.sampler.bound=1e-9",
    "corrections of clients and server": f"{SOME} local.algorithm=scaffold",
    "personal values": f'{SOME} local.personal=["output.*"] evaluation.clients=all evaluation.clients_every=2',
    "personal models": f"{SOME} local.algorithm=ditto evaluation.clients=all evaluation.clients_every=2",
    "copies of the model": f"{SOME} model.copies=2 evaluation.clients=all evaluation.clients_every=2",
    "what compression lost": (f"{ALL} compression=top-k compression.fraction=0.1 compression.error_feedback=true"),
    "state of the weights": f"{SOME} server.weights=docs.examples.easing:Easing",
    "state of the aggregator": f"{SOME} server.aggregator=docs.examples.trust:Trust",
    "batches that batch norm has counted": (
        "model=tests.reference.networks:cumulative_norm clients.sampler=all local.drop_last=true"
    ),
    "groups made once": (
        f"{ALL} topology=mediators topology.regroup=once topology.clients_per_mediator=3 "
        "topology.scheduling=random clients.availability=bernoulli clients.availability.probability=0.7"
    ),
    "clients and models in flight": (
        f"{S} topology=async topology.in_flight=3 topology.buffer=2 devices.speed=lognormal clients.sampler=ucb "
        "model.name=tests.reference.networks:cumulative_norm local.drop_last=true "
        "local.optimizer=adam local.lr=0.01 server.optimizer=momentum"
    ),
    "the best round and the bytes so far": (f"{SOME} local.lr=0.5 evaluation.every=2 evaluation.target_accuracy=0.1"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_resumed_run_remembers(name: str, tmp_path: Path):
    settings = f"{QUIET} rounds=5 {STATES[name]}".split()
    run_into(tmp_path / "whole", *settings)
    assert run_into(tmp_path / "cut", *settings, stop_after=2) == 75
    run_into(tmp_path / "cut", *settings, resume=True)
    whole, cut = (observations(fedmpi.load_run(tmp_path / name)) for name in ("whole", "cut"))
    assert len(whole["record"]) == 5
    assert {**whole, "files": []} == {**cut, "files": []}
    best = [(tmp_path / name / "model-best.safetensors").read_bytes() for name in ("whole", "cut")]
    assert best[0] == best[1]
