"""The program does what the papers say: every row of one table agrees with an independent replay in float64.

The rows are the presets and compositions of samplers, weights, algorithms and topologies. Each runs in one process;
rows with all components between them run on three ranks, where each is stopped after its first round and resumed.
Clients, rows and counts are compared exactly, weights to 2e-7, models to 1e-5 of their length after every round, losses
to 1e-5, the rest of the record up to rounding. Rows of a second table, with exact sums, are bit-identical on any number
of ranks.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from fedmpi import Config, presets
from fedmpi.config import config_toml, load_config
from fedmpi.config.writing import flat_table
from tests.reference.compare import differences
from tests.reference.program import Trace, on_ranks, records_of, traced

QUIET = "logging.tensorboard=false cluster.threads=1 checkpoint.every=0 rounds=2"
SMOOTH = "model.hidden=[12] model.activation=tanh"
"""A rounding can switch a ReLU on or off."""
IN_FLOAT64 = "model.name=tests.reference.networks:double_perceptron data.normalize=false"
"""Against the sign in Yogi, which a rounding in float32 can turn."""
UNEVEN = "data.source=digits:clients=14,alpha=0.4 local.lr=0.02"
EVEN = "data.source=digits:clients=9,partition=iid local.lr=0.02"
SMALL, EVEN_SMALL = f"{UNEVEN} model.hidden=[8]", f"{EVEN} model.hidden=[8]"
DROPPING = f"{UNEVEN} model.hidden=[10] model.dropout=0.3"
ONE_STEP = "local.steps=1 local.batch_size=all"
SAMPLED = "samples.sampler=bernoulli samples.budget=200"
ALL = "clients.sampler=all"
SOME = "clients.sampler=uniform clients.count=9"
BY_SIZE = "clients.sampler=weighted clients.count=9"
AVAILABLE = "clients.availability=bernoulli clients.availability.probability"
AWAY = f"{AVAILABLE}=0.6 clients.failure_rate=0.3"
TIMED = "devices=true devices.speed=lognormal"
CLOCK = f"{TIMED} clients.sampler=uniform clients.count=5"
PRIVATE = f"samples.size.estimate=randomized-response {ALL} {SAMPLED} {ONE_STEP} samples.size.max_size"
COPIES = f"{SMALL} rebalance=true rebalance.weights=original"
AUGMENTED = f"{COPIES} clients.sampler=uniform clients.count=6"
STRATA = f"{SMALL} clients.sampler=stratified clients.sampler.strata=3 clients.sampler.within_stratum=uniform"
STRATA_OF_6, OPENING = f"{STRATA} clients.count=6", "clients.sampler.initial_step=true"
FLIPPED = "attack=sign-flip attack.scale=3"
TRIMMED = "server.aggregator=trimmed-mean server.aggregator.trim=0.3"
KRUM = "server.aggregator=krum server.aggregator.byzantine=3 server.aggregator.keep=2"
MEDIATORS = (
    f"topology=mediators topology.clients_per_mediator=3 topology.epochs=2 {UNEVEN} "
    "model.hidden=[6] model.activation=tanh model.dropout=0.3"
)
ADAM = "local.optimizer=adam local.lr=0.01 local.optimizer.epsilon=1e-3"
TORCH = (
    "local.optimizer.momentum=0.9 local.optimizer.nesterov=true local.optimizer.weight_decay=0.01 local.clip_norm=1 "
    "local.schedule=cosine local.schedule_unit=step local.warmup=5"
)
RATIO = "samples.sampler=ratio samples.sampler.ratio"

COMPOSITIONS: dict[str, str] = {
    "short last batches are left out": f"{UNEVEN} {SMOOTH} preset=fedavg clients.count=6 local.epochs=2 "
    "local.drop_last=true devices=true clients.over_selection=1.5",
    "a client drawn twice counts twice": f"{SMALL} {BY_SIZE} {SAMPLED} {ONE_STEP} server.weights=gradient-sum",
    "and where its work is not merged": f"{SMALL} {BY_SIZE} {SAMPLED} local.epochs=2 server.weights=gradient-sum "
    "logging.diagnostics=true",
    "samples count squared": f"{SMALL} {SAMPLED} {ONE_STEP} {ALL} server.weights=gradient-sum-squared",
    "squared and not merged": f"{SMALL} {BY_SIZE} {SAMPLED} local.epochs=2 server.weights=gradient-sum-squared",
    "merged work draws other masks in every round": f"{DROPPING} {ONE_STEP} {ALL}",
    "merged rows draw other masks": f"{DROPPING} {SAMPLED} {ONE_STEP} {ALL} server.weights=gradient-sum",
    "one step takes no more than a batch of the sampled rows": f"{SMALL} {SOME} {RATIO}=0.7 local.steps=1 "
    "local.batch_size=8",
    "exactly K rows": f"{SMALL} {CLOCK} {AWAY} samples.sampler=exact samples.budget=90 local.epochs=2",
    "clients that hold M samples are clipped": f"{EVEN_SMALL} {PRIVATE}=160",
    "clients that hold M − 1 samples are not": f"{EVEN_SMALL} {PRIVATE}=161",
    "clients that do not clip are exposed": f"{EVEN_SMALL} {PRIVATE}=161 samples.size.clip=false "
    "server.weights=uniform",
    "running statistics are averaged, and moved by no server optimizer": f"{EVEN} {SOME} local.batch_size=20 "
    "model.name=tests.reference.networks:batch_norm_mlp server.optimizer=adam server.optimizer.lr=0.05 local.steps=3 "
    "clients.count=4",
    "any of those who arrive together are taken": f"{EVEN_SMALL} {SOME} {RATIO}=0.9 clients.count=3 "
    "clients.over_selection=2 devices=true local.steps=2",
    "attacks are compressed like updates, and clipped": f"{SMALL} {ALL} {FLIPPED} compression=int8 "
    "privacy.clip_norm=0.2 server.weights=uniform",
    "flipped labels are trained on in merged rows": f"{SMALL} {ALL} attack=label-flip {SAMPLED} {ONE_STEP}",
    "the median of sampled rows, after drop-outs, moved by Adam": f"{SMALL} {ALL} {SAMPLED} {AWAY} "
    "server.aggregator=median server.optimizer=adam server.optimizer.lr=0.05",
    "clipped norms of updates in eight bits": f"{SMALL} {SOME} server.aggregator=norm-clip "
    "server.aggregator.bound=0.15 compression=int8",
    "trimmed means of updates and noise": f"{SMALL} {SOME} attack=noise attack.scale=0.1 {TRIMMED}",
    "Krum": f"{SMALL} {ALL} {FLIPPED} {KRUM}",
    "the median of the opening step": f"{STRATA_OF_6} server.aggregator=median {OPENING}",
    "vectors go to those who drop out, and do not come back": f"{SMALL} {SOME} local.algorithm=scaffold "
    "clients.failure_rate=0.4",
    "SCAFFOLD from a file": f"{SMALL} {SOME} local.algorithm=docs.examples.algorithm:Scaffold",
    "FedNova's second vector takes its time on the way up": f"{SMALL} {CLOCK} local.algorithm=fednova "
    "devices.upload.median=5e3",
    "FedDyn": f"{SMALL} {SOME} local.algorithm=feddyn server.weights=uniform",
    "an opening step on a batch lasts as long as a batch": f"{STRATA_OF_6} {TIMED} {OPENING} local.batch_size=8 "
    "clients.sampler.features.probe=batch devices.speed.median=5.0",
    "samples of an opening step count as used": f"{STRATA_OF_6} {SAMPLED} {OPENING} logging.diagnostics=true",
    "models after one step spread as far as that step goes": f"{STRATA_OF_6} logging.diagnostics=true "
    "clients.sampler.features=one-step-change clients.sampler.allocation=neyman",
    "noise is shared out among those who are requested": f"{SMALL} {SOME} server.weights=uniform "
    "privacy.clip_norm=0.2 privacy.noise_multiplier=1",
    "q-FFL with q = 0.3 and another constant": f"{SMALL} {BY_SIZE} server.weights=q-ffl server.weights.q=0.3 "
    "server.weights.lipschitz=7.0",
    "importance sampling, without replacement, sequential": f"{SMALL} clients.sampler=importance clients.count=5 "
    "clients.sampler.design=sequential server.weights=uniform clients.sampler.refresh=1 "
    "clients.sampler.refresh_clients=selected",
    "mediators: SGD with a proximal pull, after drop-outs, timed, moved by a server's Adam": f"{MEDIATORS} {SOME} "
    f"{TIMED} clients.count=8 local.proximal_mu=0.5 clients.failure_rate=0.2 {AVAILABLE}=0.8 server.weights=uniform "
    "server.optimizer=adam server.optimizer.lr=0.02",
    "mediators: Adam whose memory goes along, on copies that do not weigh": f"{MEDIATORS} {COPIES} {SOME} {ADAM} "
    "clients.count=7 topology.keep_optimizer=true",
    "mediators: Adam that starts afresh at every visit, on sampled rows, drawn with replacement": f"{MEDIATORS} "
    f"{BY_SIZE} {ADAM} local.steps=2 samples.sampler=bernoulli samples.budget=60 topology.scheduling=random",
    "mediators: groups made once, three epochs, unbiased weights, momentum": f"{MEDIATORS} {ALL} {AVAILABLE}=0.7 "
    f"{RATIO}=0.3 server.weights=unbiased server.optimizer=momentum server.optimizer.beta1=0.5 "
    "topology.clients_per_mediator=5 topology.epochs=3 topology.regroup=once",
    "mediators: no client available in some rounds": f"{MEDIATORS} {ALL} {AVAILABLE}=0.04 rounds=5",
    "Duchi's reports, repeated, at an inverse rate, moved by Adagrad": f"{DROPPING} {SOME} {SAMPLED} "
    "model.dropout=0.25 samples.size.estimate=duchi samples.size.epsilon=0.5 samples.size.max_size=121 "
    "samples.size.query=selected samples.size.reuse_reports=true local.schedule=inverse model.activation=gelu "
    "local.engine=sequential "
    "server.optimizer=adagrad server.optimizer.lr=0.05 server.weights=uniform logging.diagnostics=true",
    "piecewise reports, half a cosine, groups of labels that are away": f"{EVEN_SMALL} {ALL} {SAMPLED} "
    "data.normalize=false samples.size.estimate=piecewise samples.size.max_size=200 local.schedule=cosine rounds=3 "
    "clients.availability=label-group clients.availability.by_label=[0.9,0.4] server.optimizer=momentum "
    "server.optimizer.lr=0.05 server.weights=uniform local.proximal_mu=0.2 server.exact=true",
    "Adam, falling in steps, on devices of two classes": f"{SMALL} {ADAM} "
    "clients.sampler=weighted clients.sampler.replace=false clients.fraction=0.5 local.schedule=step rounds=3 "
    "local.schedule.every=2 devices=true devices.speed=classes devices.speed.rates=[100,1000] "
    "devices.speed.shares=[0.3,0.7] devices.upload=lognormal logging.diagnostics=true evaluation.every=2",
    "smoothed labels, updates in sixteen bits whose errors follow": f"{EVEN} {SOME} clients.count=4 "
    "task.loss=label-smoothing task.loss.smoothing=0.2 "
    "model.name=tests.reference.networks:dropout_mlp model.width=12 compression=float16 "
    "compression.error_feedback=true local.steps=3 local.engine=batched",
    "squared losses, the largest values first": f"{EVEN} {SOME} {IN_FLOAT64} task.loss=tests.tasks.own_losses:squared "
    "task.loss.scale=2.0 compression=top-k compression.fraction=0.2 compression.error_feedback=true",
    "strata of projected gradients, importance within them": f"{STRATA_OF_6} server.weights=stratified "
    "clients.sampler.features=full-gradient clients.sampler.projection_above=1000 "
    "clients.sampler.within_stratum=importance clients.sampler.features.probe=sample clients.sampler.refresh=1 "
    "clients.over_selection=1.5 devices=true",
    "importance sampling, systematic, of centres, after drop-outs": f"{SMALL} clients.sampler=importance "
    "clients.count=5 "
    "clients.sampler.features=compressed-gradient clients.sampler.features.codebook_size=2 clients.failure_rate=0.3 "
    "clients.sampler.features.decompress=false clients.sampler.features.probe=batch server.weights=unbiased",
    **{
        f"OPTICS, outliers: {outliers}": f"{SMALL} clients.sampler=stratified clients.count=6 "
        "clients.sampler.clustering=optics clients.sampler.clustering.min_samples=2 "
        f"clients.sampler.clustering.xi={xi} "
        f"clients.sampler.clustering.outliers={outliers} clients.sampler.allocation={allocation} "
        f"clients.sampler.features=compressed-gradient server.weights={weights} "
        f"clients.sampler.design={design} clients.sampler.within_stratum=importance"
        for outliers, xi, allocation, weights, design in (
            ("nearest", 0.05, "neyman clients.sampler.spread=pairwise", "stratified", "sequential"),
            ("singletons", 0.25, "proportional", "normalized", "systematic"),
            ("stratum", 0.05, "neyman clients.sampler.spread=std", "unbiased", "systematic"),
            ("drop", 0.25, "equal", "literal", "sequential"),
        )
    },
    **{
        f"rows are expected from the samples of {asked}": f"{SMALL} {CLOCK} {SAMPLED} {AWAY} "
        f"clients.over_selection=1.6 samples.size.query={asked}"
        for asked in ("all", "selected")
    },
    **{
        f"copies do not weigh with {weights} weights": f"{AUGMENTED} {AWAY} server.weights={weights}"
        for weights in ("normalized", "unbiased", "literal", "samples")
    },
    "sampled copies do not weigh, merged": f"{AUGMENTED} {ONE_STEP} {RATIO}=0.8",
    "sampled copies do not weigh": f"{AUGMENTED} local.epochs=1 {RATIO}=0.4",
    **{
        f"strata whose clients are away keep their share: {weights}, {allocation}, m = {count}": f"{STRATA} {AWAY} "
        f"server.weights={weights} clients.count={count} clients.sampler.allocation={allocation} "
        "clients.sampler.features=label-histogram"
        for weights, allocation, count in (
            *(("stratified", "proportional", 2), ("stratified", "neyman", 6), ("normalized", "proportional", 6)),
            *(("unbiased", "equal", 2), ("literal", "proportional", 6)),
        )
    },
    **{
        f"participants without a sampled row change nothing: m = {count}, {allocation}": f"{STRATA} "
        "samples.sampler=bernoulli samples.budget=6 samples.size.query=selected server.weights=stratified "
        f"clients.count={count} clients.sampler.allocation={allocation}"
        for count, allocation in ((6, "neyman"), (6, "equal"), (2, "neyman"), (14, "proportional"))
    },
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)


def preset_config(name: str) -> Config:
    """A preset on fourteen clients of the embedded digits."""
    fitted = f"{QUIET} rounds=3 {UNEVEN.split()[0]} {IN_FLOAT64 if name == 'fedyogi' else SMOOTH} preset={name}".split()
    given = load_config(None, fitted)
    fitted += ["clients.count=5"] if given.clients.count else []
    fitted += ["clients.fraction=0.4"] if given.clients.fraction else []
    fitted += ["samples.budget=300"] if given.samples.budget else []
    fitted += ["samples.size.max_size=80"] if given.samples.size.estimate != "exact" else []
    return load_config(None, fitted)


ELSEWHERE = ("fedper", "fedbn", "fedrep", "ditto", "per-fedavg", "ifca", "fedasync", "fedbuff")
"""Presets with plain loops in tests/core/test_personal.py and test_asynchronous.py."""
ROWS = {preset.name: preset_config(preset.name) for preset in presets() if preset.name not in ELSEWHERE}
ROWS |= {name: load_config(None, f"{QUIET} {settings}".split()) for name, settings in COMPOSITIONS.items()}


CHOICES = (
    *("clients.sampler", "clients.sampler.features", "clients.sampler.clustering", "clients.availability"),
    *(
        "samples.sampler",
        "samples.size.estimate",
        "local.algorithm",
        "local.optimizer",
        "topology",
        "rebalance.weights",
    ),
    *(
        "server.weights",
        "server.aggregator",
        "server.optimizer",
        "compression",
        "attack",
        "clients.sampler.initial_step",
    ),
)


def covering(rows: dict[str, Config]) -> dict[str, Config]:
    """Rows in which every choice occurs that occurs in any."""
    seen: set[tuple[str, str]] = set()
    found = {}
    for name, config in rows.items():
        flat = flat_table(config)
        named = {(key, str(flat[key])) for key in CHOICES if key in flat}
        if named - seen:
            found[name] = config
        seen |= named
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_row_agrees_with_the_plain_loop(name: str, tmp_path: Path) -> None:
    trace = traced(ROWS[name], tmp_path / "run")
    assert trace is not None
    found = differences(ROWS[name], trace)
    assert not found, "\n".join([*found[:10], config_toml(ROWS[name])])


def disagreeing(configs: dict[str, Config], traces: dict[str, Trace]) -> dict[str, list[str]]:
    """The rows of a job that differ from the plain loop, and how."""
    found = {
        name: [str(traces[name]["refusal"])] if "refusal" in traces[name] else differences(config, traces[name])[:5]
        for name, config in configs.items()
    }
    return {name: texts for name, texts in found.items() if texts}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_components_agree_on_three_ranks_after_a_resume(tmp_path: Path) -> None:
    rows = covering(ROWS)
    wrong = disagreeing(rows, on_ranks(3, rows, tmp_path))
    assert not wrong, json.dumps(wrong, indent=1)


WITHOUT_WINDOW = (
    "-c",
    "import sys; sys.modules['fedmpi.mpi.window'] = None; from tests.reference.program import *; run_guarded(main)",
)
GOLDEN = ("fedavg", "astraea")


@pytest.mark.timeout(400)
def test_the_shared_memory_of_a_node_can_be_removed(tmp_path: Path) -> None:
    """Without its module, ranks wait and sum through MPI, and still agree with the plain loop."""
    golden = {name: ROWS[name] for name in GOLDEN}
    traces = on_ranks(2, golden, tmp_path, "whole", WITHOUT_WINDOW)
    assert not disagreeing(golden, traces)
    assert not any(trace["window"].any() for trace in traces.values())


EXACT: dict[str, str] = {
    "SCAFFOLD beside a server that only serves": f"{SMALL} {SOME} local.algorithm=scaffold server.weights=uniform "
    "cluster.server_trains=never cluster.placement=shared evaluation.clients=all evaluation.fine_tune=1 "
    "evaluation.batch_size=50",
    "FedDyn, whose vectors are in a file": f"{SMALL} {SOME} local.algorithm=feddyn server.weights=uniform "
    "cluster.state_memory=0.000003 cluster.placement=shared",
    "FedNova on ranks that own their clients": f"{SMALL} {SOME} local.algorithm=fednova cluster.placement=owner "
    "evaluation.clients=7",
    "sampled rows of all clients, Yogi": f"{SMALL} {ALL} {SAMPLED} {AVAILABLE}=0.3 cluster.placement=shared "
    "cluster.server_trains=always local.epochs=1 server.optimizer=yogi server.optimizer.lr=0.02 model.activation=relu",
    "stale strata, updates whose lost values follow": f"{STRATA_OF_6} clients.sampler.features=full-gradient "
    "clients.sampler.refresh=1 clients.sampler.refresh_clients=selected compression=top-k compression.fraction=0.05 "
    "compression.error_feedback=true",
    "mediators, each on one rank": f"{MEDIATORS} {SOME} {ADAM} cluster.placement=mediator",
    "mediators whose models and moments move from rank to rank": f"{MEDIATORS} {SOME} {ADAM} "
    "topology.keep_optimizer=true cluster.placement=owner",
    "dropout, steps of torch, noise of trees": f"{DROPPING} clients.sampler=shuffled clients.count=7 {TORCH} rounds=3 "
    "server.weights=uniform privacy.clip_norm=0.5 privacy.noise_multiplier=0.5 privacy.noise=tree "
    "evaluation.clients=participants",
    "draws by history, sketches and vectors": f"{SMALL} clients.sampler=tests.clients.test_history:Historian "
    "clients.count=3 clients.failure_rate=0.3 devices=true evaluation.every=1 rounds=5 logging.participants=true",
    "q-FFL, whose weights follow from losses": f"{SMALL} {BY_SIZE} server.weights=q-ffl",
    "trimmed means of attacked updates": f"{SMALL} {SOME} {FLIPPED} {TRIMMED}",
    "Krum": f"{SMALL} {ALL} {FLIPPED} {KRUM} local.batch_size=all",
    **{
        f"personal batch norm, clients trained {where}": f"{EVEN} {SOME} local.steps=3 local.batch_size=20 "
        "local.drop_last=true model.name=tests.reference.networks:batch_norm_mlp clients.count=4 "
        'local.personal=["Batch*","4.bias"] '
        f"cluster.placement={place} evaluation.clients=all evaluation.clients_every=2 evaluation.fine_tune=1"
        for where, place in (("anywhere", "shared"), ("by their owners", "owner"))
    },
    "Ditto, whose models move from rank to rank": f"{SMALL} {SOME} clients.count=4 local.algorithm=ditto "
    "cluster.placement=shared evaluation.clients=all evaluation.clients_every=2",
    "copies of the model, chosen by their losses": f"{SMALL} {SOME} clients.count=4 model.copies=2 "
    "evaluation.clients=all evaluation.clients_every=2 evaluation.fine_tune=1",
    "one step, updates in eight bits, an adaptive norm": f"{DROPPING} {ONE_STEP} {ALL} compression=int8 "
    "server.weights=uniform privacy.clip_norm=0.5 privacy.noise_multiplier=0.5 privacy.adaptive_clip={count_noise=1}",
}
MORE_EXACT: dict[str, str] = {
    "batches that are counted, balanced classes": f"{UNEVEN} {SOME} {TORCH} local.batch_size=20 local.drop_last=true "
    "model=tests.reference.networks:cumulative_norm task.loss.class_weights=balanced",
    "intervals, energy, partial work before a deadline": f"{SMALL} {SOME} {TIMED} local.epochs=2 devices.power=true "
    "clients.availability=intervals clients.availability.file=tests/keys/intervals.csv devices.deadline=9 "
    "devices.late=partial devices.speed.median=12 local.batch_size=60 rounds=4 evaluation.clients=4",
    **{
        f"work of each client: {work}": f"{SMALL} clients.count=5 clients.sampler=tests.core.own_work:dealt {work}"
        for work in (
            "local.batch_size=8",
            "clients.sampler.names=steps samples.sampler=tests.core.own_work:hardest cluster.placement=owner " + TIMED,
            "clients.sampler.names=budget+lr samples.sampler=tests.core.own_work:as_expected local.epochs=2 " + TIMED,
        )
    },
    "models of several versions": f"{SMALL} {TIMED} topology=async topology.in_flight=6 topology.buffer=1 "
    "topology.average=models clients.failure_rate=0.1 rounds=12 local.batch_size=20 local.drop_last=true "
    "model.name=tests.reference.networks:cumulative_norm",
}
"""For slow tests."""
TWICE = f"{QUIET} server.exact=true"
EXACT_ROWS = {name: load_config(None, f"{TWICE} {settings}".split()) for name, settings in (EXACT | MORE_EXACT).items()}


@cache
def alone(name: str) -> Trace:
    """The trace of an exact row in one process."""
    with TemporaryDirectory() as folder:
        found = traced(EXACT_ROWS[name], Path(folder) / "run")
    assert found is not None
    return found


@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_exact_sums_are_bit_identical_on_any_number_of_ranks_after_a_resume(ranks: int, tmp_path: Path) -> None:
    rows = {name: row for name, row in EXACT_ROWS.items() if ranks > 3 or name in EXACT}
    for name, trace in on_ranks(ranks, rows, tmp_path).items():
        assert "refusal" not in trace, trace
        assert trace["window"].all() == (ranks > 1)
        assert np.array_equal(trace["models"], alone(name)["models"]), name
        assert np.array_equal(sorted(trace["rows"].tolist()), sorted(alone(name)["rows"].tolist())), name
        assert records_of(trace) == records_of(alone(name)), name
        assert trace["tables"] == alone(name)["tables"], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_continues_with_another_number_of_ranks_bit_for_bit(tmp_path: Path) -> None:
    on_ranks(2, EXACT_ROWS, tmp_path, "first")
    for number, (name, config) in enumerate(EXACT_ROWS.items()):
        rest = traced(config, tmp_path / str(number), "rest")
        assert rest is not None and np.array_equal(rest["models"], alone(name)["models"][1:]), name


def test_the_plain_loop_sees_a_difference(tmp_path: Path) -> None:
    config = ROWS["fedavg"]
    trace = traced(config, tmp_path / "run")
    assert trace is not None
    records = [json.loads(line) for line in str(trace["records"]).splitlines()]
    records[1]["samples"] += 1
    changed = {
        "rows": trace["rows"] + [0, 0, 1],
        "factors": trace["factors"] * np.where(trace["factors"][:, 1:2] == trace["factors"][0, 1], [1, 1, 1.001], 1),
        "models": trace["models"] * np.float32(1.0001),
        "records": np.array("\n".join(map(json.dumps, records))),
    }
    for key, value in changed.items():
        assert differences(config, {**trace, key: value}), key
