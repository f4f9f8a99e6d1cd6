"""Effect of every key of the configuration: two values, the first link that they change, and their properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedmpi.records.history import clients_from_text
from fedmpi.records.tables import read_clients
from tests.keys.watched import Seen, Watcher

Promise = Callable[[Seen, Seen], bool]


@dataclass(frozen=True)
class Key:
    """Two runs that differ in one key."""

    base: str  # Settings under which the key matters
    values: tuple[str, str]  # (str, str)
    first: str  # The first link of a run (`watched.LINKS`) that they change; those before it stay the same
    # Whether the two runs are what the key says, where more can be said than that they differ
    promise: Promise | None = None


def near(one: object, other: object, tolerance: float = 1e-9) -> bool:
    """Return True if numbers are equal up to floating-point rounding."""
    return bool(np.allclose(one, other, rtol=tolerance, atol=0))


def lengths(seen: Seen) -> list[int]:
    """Participants of every round."""
    return [len(clients) for clients, _ in seen.cohort]


S = "model.hidden=[6]"
SOME = f"{S} clients.sampler=uniform clients.count=4"
ALL = f"{S} clients.sampler=all"
STEP = "local.steps=1 local.batch_size=all rounds=1"
DRAWN = f"{S} clients.sampler=stratified clients.count=4 server.weights=stratified"
STRATA = f"{DRAWN} clients.sampler.strata=3 clients.sampler.features=full-gradient"
UNIFORM = "clients.sampler.within_stratum=uniform"
SQUEEZED = f"{DRAWN} clients.sampler.strata=3 clients.sampler.features=compressed-gradient"
OPTICS = (
    f"{DRAWN} {UNIFORM} clients.sampler.features=label-histogram clients.sampler.clustering=optics "
    "clients.sampler.allocation=proportional"
)
ASKED = f"{SOME} samples.sampler=bernoulli samples.budget=200 server.weights=uniform"
PRIVATE = f"{ASKED} samples.size.estimate=randomized-response samples.size.max_size=200"
ADAM = f"{SOME} local.optimizer=adam local.lr=0.01"
MEDIATED = f"{S} topology=mediators clients.sampler=uniform clients.count=6"
COPIES = f"{SOME} data.source=digits:clients=6,alpha=0.3 rebalance=true"
STILL = "rebalance.rotation=0 rebalance.shear=0 rebalance.shift=0 rebalance.zoom=0"
AWAY = f"{ALL} clients.availability=bernoulli"
CLOCK = f"{SOME} devices=true rounds=1"
FREE = "devices.upload.median=1e30 devices.download.median=1e30"
FAST = "devices.speed.median=1e30"
CLASSES = f"{CLOCK} {FREE} devices.speed=classes"
CLIPPED = f"{ALL} server.weights=uniform"
NOISED = f"{CLIPPED} privacy.clip_norm=0.1"

KEYS: dict[str, Key] = {
    "preset": Key("clients.count=4 model.hidden=[6]", ("fedavg", "fedprox"), "model"),
    "seed": Key(SOME, ("0", "1"), "cohort"),
    "rounds": Key(SOME, ("2", "3"), "strata"),
    "data.source": Key(SOME, ("digits:clients=12,alpha=0.5", "digits:clients=7"), "cohort"),
    "data.verify": Key(
        f"{SOME} data.source={{damaged}}", ("false", "true"), "refusal", lambda a, b: "checksum" in b.refusal
    ),
    "data.normalize": Key(SOME, ("true", "false"), "model"),
    "model": Key(
        "clients.sampler=all rounds=1 data.source=digits:clients=9,partition=iid local.batch_size=all",
        ("mlp", "tests.reference.networks:batch_norm_mlp"),
        "model",
        lambda a, b: (a.summary["parameters"], b.summary["parameters"]) == (55_210, 780),
    ),
    "model.lora": Key(
        f"{SOME} rounds=1 model.hidden=[20]",
        ("{{rank=1}}", "{{rank=2}}"),
        "model",
        lambda a, b: (a.summary["parameters"], b.summary["parameters"]) == (64 + 20 + 20 + 10, 2 * (64 + 20 + 20 + 10)),
    ),
    "task.loss": Key(f"{SOME} rounds=1", ("cross-entropy", "focal"), "model"),
    "task.metrics": Key(
        f"{SOME} rounds=1",
        ('[{{name="top-k",k=2}}]', '[{{name="top-k",k=2}},"calibration-error"]'),
        "record",
        lambda a, b: (
            set(b.record[0]) - set(a.record[0]) == {"test_calibration_error"}
            and a.recorded("test_top_2_accuracy") == b.recorded("test_top_2_accuracy")
        ),
    ),
    "clients.sampler": Key(f"{S} clients.count=4", ("uniform", "weighted"), "cohort"),
    "clients.count": Key(f"{S} clients.sampler=uniform", ("3", "5"), "cohort"),
    "clients.fraction": Key(f"{S} clients.sampler=uniform", ("0.25", "0.5"), "cohort"),
    "clients.sampler.features": Key(
        f"{DRAWN} clients.sampler.strata=3", ("full-gradient", "compressed-gradient"), "strata"
    ),
    "clients.sampler.features.codebook_size": Key(SQUEEZED, ("2", "9"), "strata"),
    "clients.sampler.features.decompress": Key(SQUEEZED, ("true", "false"), "strata"),
    "clients.sampler.features.probe": Key(STRATA, ("full", "sample"), "strata"),
    "clients.sampler.refresh": Key(STRATA, ("0", "1"), "strata"),
    "clients.sampler.refresh_clients": Key(
        STRATA,
        ("all", "selected"),
        "strata",
        lambda a, b: (
            (
                int((a.strata[1][2] != b.strata[1][2]).sum()) == 8
                and np.array_equal(b.strata[0][2] != b.strata[1][2], np.isin(np.arange(12), b.cohort[0][0]))
            )
            and (a.recorded("bytes_client_up")[1], b.recorded("bytes_client_up")[1]) == (16 * 1840, 8 * 1840)
        ),
    ),
    "clients.sampler.initial_step": Key(
        f"{STRATA} {UNIFORM} clients.sampler.refresh=0",
        ("false", "true"),
        "cohort",
        lambda a, b: lengths(a) == [4, 4] and lengths(b) == [12, 4] and b.recorded("opening") == [True, None],
    ),
    "clients.sampler.clustering": Key(
        f"{DRAWN} clients.sampler.features=full-gradient", ("kmeans", "optics"), "strata"
    ),
    "clients.sampler.strata": Key(STRATA.replace("clients.sampler.strata=3 ", ""), ("2", "4"), "strata"),
    "clients.sampler.clustering.min_samples": Key(OPTICS, ("2", "5"), "strata"),
    "clients.sampler.clustering.xi": Key(OPTICS, ("0.05", "0.5"), "strata"),
    "clients.sampler.clustering.outliers": Key(OPTICS, ("singletons", "drop"), "strata"),
    "clients.sampler.projection_above": Key(
        STRATA, ("20000000", "1"), "strata", lambda a, b: near(a.strata[0][2], b.strata[0][2])
    ),
    "clients.sampler.spread": Key(STRATA, ("std", "pairwise"), "strata"),
    "samples.sampler": Key(f"{SOME} samples.budget=100", ("bernoulli", "exact"), "rows"),
    "samples.budget": Key(f"{SOME} samples.sampler=exact", ("50", "100"), "rows"),
    "samples.size.estimate": Key(ASKED, ("exact", "duchi"), "rows"),
    "samples.size.epsilon": Key(PRIVATE, ("0.5", "4"), "rows"),
    "samples.size.max_size": Key(PRIVATE, ("100", "160"), "rows"),
    "samples.size.clip": Key(f"{PRIVATE} samples.size.max_size=100", ("true", "false"), "rows"),
    "samples.size.query": Key(ASKED, ("all", "selected"), "rows"),
    "samples.size.reuse_reports": Key(PRIVATE, ("false", "true"), "rows"),
    "local.algorithm": Key(SOME, ("plain", "scaffold"), "state"),
    "local.optimizer": Key(f"{SOME} local.lr=0.01", ("sgd", "adam"), "model"),
    "local.lr": Key(f"{SOME} {STEP}", ("0.2", "0.1"), "model"),
    "local.schedule": Key(SOME, ("constant", "inverse"), "model"),
    "local.epochs": Key(SOME, ("1", "2"), "model"),
    "local.steps": Key(SOME, ("2", "5"), "model"),
    "local.batch_size": Key(SOME, ("20", "all"), "model"),
    "local.drop_last": Key(SOME, ("false", "true"), "model"),
    "local.proximal_mu": Key(f"{SOME} rounds=1", ("0", "2"), "model"),
    "local.engine": Key(
        f"{ALL} local.steps=1 local.batch_size=all",
        ("sequential", "merged"),
        "model",
        lambda a, b: a.summary["engine"].startswith("sequential") and b.summary["engine"].startswith("merged"),
    ),
    "local.on_divergence": Key(
        f"{SOME} local.lr=1e30",
        ("drop", "stop"),
        "refusal",
        lambda a, b: "training diverged" in b.refusal and a.record[0]["diverged"] == 4,
    ),
    "topology": Key(SOME, ("star", "mediators"), "mediators"),
    "topology.clients_per_mediator": Key(MEDIATED, ("2", "3"), "mediators"),
    "topology.epochs": Key(MEDIATED, ("1", "3"), "model"),
    "topology.regroup": Key(
        f"{ALL} topology=mediators topology.clients_per_mediator=3 clients.availability=bernoulli "
        "clients.availability.probability=0.7 topology.scheduling=random",
        ("once", "every-round"),
        "mediators",
        lambda a, b: together(a, 0) & apart(a, 1) == set() and together(b, 0) & apart(b, 1) != set(),
    ),
    "topology.scheduling": Key(f"{MEDIATED} topology.clients_per_mediator=2", ("greedy", "random"), "mediators"),
    "topology.target": Key(f"{MEDIATED} topology.clients_per_mediator=2", ("uniform", "test"), "record"),
    "topology.keep_optimizer": Key(
        f"{MEDIATED} local.optimizer=adam local.lr=0.01 topology.clients_per_mediator=6",
        ("false", "true"),
        "model",
        lambda a, b: (
            (a.recorded("bytes_client_down")[0], b.recorded("bytes_client_down")[0]) == (6 * 1840, 3 * 6 * 1840)
        ),
    ),
    "rebalance": Key(COPIES.replace("rebalance=true", ""), ("false", "true"), "rows"),
    "rebalance.alpha": Key(COPIES, ("0.5", "1.5"), "rows"),
    "rebalance.copies": Key(COPIES, ("ratio", "ratio-minus-one"), "rows"),
    "rebalance.mode": Key(
        f"{SOME} data.source={{augmented}} rebalance=true",
        ("stored", "virtual"),
        "refusal",
        lambda a, b: not a.refusal and "augmented twice" in b.refusal,
    ),
    "rebalance.weights": Key(COPIES, ("augmented", "original"), "factors"),
    "rebalance.rotation": Key(f"{COPIES} {STILL}", ("0", "30"), "model"),
    "rebalance.shear": Key(f"{COPIES} {STILL}", ("0", "30"), "model"),
    "rebalance.shift": Key(f"{COPIES} {STILL}", ("0", "0.3"), "model"),
    "rebalance.zoom": Key(f"{COPIES} {STILL}", ("0", "0.3"), "model"),
    "server.weights": Key(SOME, ("samples", "uniform"), "factors"),
    "server.aggregator": Key(SOME, ("mean", "median"), "model"),
    "server.optimizer": Key(SOME, ("sgd", "momentum"), "model"),
    "server.exact": Key(
        f"{SOME} local.engine=sequential model.activation=tanh",
        ("false", "true"),
        "model",
        lambda a, b: np.linalg.norm(a.model[-1] - b.model[-1]) < 1e-5 * np.linalg.norm(a.model[-1]),
    ),
    "attack": Key(f"{ALL} clients.attack_fraction=0.5", ("sign-flip", "label-flip"), "model"),
    "clients.attack_fraction": Key(f"{ALL} attack=sign-flip", ("0.25", "0.5"), "model"),
    "attack.scale": Key(f"{ALL} attack=sign-flip clients.attack_fraction=1 rounds=1", ("2", "1"), "model"),
    "clients.availability": Key(ALL, ("always", '{name="bernoulli",probability=0.6}'), "cohort"),
    "clients.failure_rate": Key(ALL, ("0", "0.5"), "cohort"),
    "clients.over_selection": Key(f"{CLOCK} devices.speed=lognormal", ("1", "2"), "cohort"),
    "devices": Key(SOME, ("false", "true"), "record"),
    "devices.speed": Key(CLOCK, ("constant", "lognormal"), "record"),
    "devices.speed.median": Key(f"{CLOCK} {FREE}", ("1000", "50"), "record"),
    "devices.speed.sigma": Key(f"{CLOCK} {FREE} devices.speed=lognormal", ("0", "2"), "record"),
    "devices.speed.rates": Key(f"{CLASSES} devices.speed.shares=[0,1]", ("[1,100]", "[1,50]"), "record"),
    "devices.speed.shares": Key(f"{CLASSES} devices.speed.rates=[10,100]", ("[1,0]", "[0,1]"), "record"),
    "devices.upload.median": Key(f"{CLOCK} {FAST} devices.download.median=1e30", ("1000", "200"), "record"),
    "devices.download.median": Key(f"{CLOCK} {FAST} devices.upload.median=1e30", ("1000", "200"), "record"),
    "devices.upload.sigma": Key(
        f"{CLOCK} {FAST} devices.upload=lognormal devices.upload.median=1000 devices.download.median=500",
        ("0", "1"),
        "record",
    ),
    "compression": Key(SOME, ("none", "float16"), "model"),
    "compression.error_feedback": Key(f"{ALL} compression=top-k compression.fraction=0.1", ("false", "true"), "model"),
    "privacy.clip_norm": Key(CLIPPED, ("0.02", "100"), "model"),
    "privacy.noise_multiplier": Key(NOISED, ("2", "4"), "model"),
    "privacy.delta": Key(f"{NOISED} privacy.noise_multiplier=2", ("1e-5", "1e-3"), "record"),
    "cluster.device": Key(SOME, ("cpu", "cuda:77"), "refusal", lambda a, b: not a.refusal and "cuda:77" in b.refusal),
    "cluster.threads": Key(
        f"{S} clients.sampler=uniform clients.count=1 rounds=1",
        ("1", "2"),
        "threads",
        lambda a, b: (a.threads, b.threads) == (1, 2),
    ),
    "cluster.state_memory": Key(
        f"{SOME} local.algorithm=scaffold",
        ("2", str(2 * 1840 / 2**30)),
        "state",
        lambda a, b: a.state == [0, 0] and b.state[0] == 2 and np.array_equal(a.model[-1], b.model[-1]),
    ),
    "evaluation.every": Key(
        f"{SOME} rounds=5",
        ("1", "2"),
        "record",
        lambda a, b: (
            [(s is None) for s in b.recorded("test_loss")] == [True, False, True, False, False]
            and None not in a.recorded("test_loss")
            and b.recorded("test_loss")[3:] == a.recorded("test_loss")[3:]
        ),
    ),
    "evaluation.on": Key(
        f"{SOME} data.source={{val}}",
        ("test", "val"),
        "record",
        lambda a, b: (a.summary["best_chosen_on"], b.summary["best_chosen_on"]) == ("test", "val"),
    ),
    "evaluation.batch_size": Key(
        f"{SOME} rounds=1",
        ("200", "150"),
        "record",
        lambda a, b: a.batches == [200, 155] and b.batches == [150, 150, 55],
    ),
    "evaluation.target_accuracy": Key(
        SOME,
        ("1e-9", "1"),
        "summary",
        lambda a, b: (
            (a.summary["rounds_to_target"], b.summary["rounds_to_target"]) == (1, None)
            and a.summary["target_accuracy"] == 1e-9
        ),
    ),
    "evaluation.clients": Key(
        SOME,
        ("all", "participants"),
        "record",
        lambda a, b: len(viewed(a)) == 12 and viewed(b) == b.cohort[1][0].tolist(),
    ),
    "evaluation.clients_every": Key(
        f"{SOME} rounds=5 evaluation.clients=all",
        ("1", "2"),
        "record",
        lambda a, b: (
            [mean is None for mean in b.recorded("client_accuracy_mean")] == [True, False, True, False, False]
            and b.recorded("client_loss_mean")[3:] == a.recorded("client_loss_mean")[3:]
            and len(viewed(a)) == 5 * 12
        ),
    ),
    "evaluation.fine_tune": Key(
        f"{SOME} evaluation.clients=all",
        ("0", "2"),
        "record",
        lambda a, b: (
            a.record[1].items() <= b.record[1].items()
            and b.record[1]["client_tuned_loss_mean"] < b.record[1]["client_loss_mean"]
        ),
    ),
    "checkpoint.every": Key(
        f"{SOME} rounds=5 checkpoint.keep=9",
        ("2", "3"),
        "files",
        lambda a, b: saved(a) == [2, 4, 5] and saved(b) == [3, 5],
    ),
    "checkpoint.keep": Key(
        f"{SOME} rounds=5 checkpoint.every=1",
        ("1", "3"),
        "files",
        lambda a, b: saved(a) == [5] and saved(b) == [3, 4, 5],
    ),
    "logging.tensorboard": Key(
        SOME,
        ("false", "true"),
        "files",
        lambda a, b: (
            [*a.files, "events.out.tfevents"] == [*sorted(b.files, key=lambda name: name.startswith("events"))]
        ),
    ),
    "logging.interval": Key(
        f"{SOME} rounds=5",
        ("0", "1e6"),
        "shown",
        lambda a, b: (
            [line.split()[1] for line in a.shown] == [f"{t}/5" for t in range(1, 6)]
            and [line.split()[1] for line in b.shown] == ["1/5", "5/5"]
        ),
    ),
    "logging.diagnostics": Key(
        f"{SOME} local.engine=sequential",
        ("false", "true"),
        "record",
        lambda a, b: (
            {"update_norm", "client_drift", "gradient_diversity", "gamma", "clients_used"} <= b.record[0].keys()
        ),
    ),
    "logging.participants": Key(
        SOME,
        ("false", "true"),
        "record",
        lambda a, b: len(clients_from_text(b.record[0]["clients"])) == b.record[0]["participants"],
    ),
    "logging.reference": Key(
        ALL,
        ("{reference}", "{other}"),
        "record",
        lambda a, b: a.recorded("weight_divergence")[-1] == 0 < b.recorded("weight_divergence")[-1],
    ),
}
"""Every key that one rank shows. tests/reference says what most of them do; here each is seen to have an effect."""

OF_RANKS = ("cluster.placement", "cluster.balance", "cluster.server_trains", "cluster.reduction")
"""Keys that mean something on several ranks only: see tests/mpi and tests/core/test_placement.py."""

OF_STALLS = ("cluster.stall_timeout",)
"""Keys that show in a stalled job only: see tests/faults/test_signals_and_stalls.py."""

OF_DATA = ("task.kind",)
"""Keys whose values each need other data: see tests/tasks/test_kinds.py."""


def together(seen: Seen, t: int) -> set[tuple[int, int]]:
    """Pairs of clients that share a mediator in round t."""
    return {pair for pair, shared in _pairs(seen, t).items() if shared}


def apart(seen: Seen, t: int) -> set[tuple[int, int]]:
    """Return pairs of clients that are selected in round t with different mediators."""
    return {pair for pair, shared in _pairs(seen, t).items() if not shared}


def _pairs(seen: Seen, t: int) -> dict[tuple[int, int], bool]:
    of = dict(zip(seen.cohort[t][0].tolist(), seen.mediators[t].tolist(), strict=True))
    return {(one, other): of[one] == of[other] for one in of for other in of if one < other}


def viewed(seen: Seen) -> list[int]:
    """The clients that were evaluated by themselves, evaluation after evaluation."""
    return [int(client) for client in read_clients(seen.folder)["client"]]


def saved(seen: Seen) -> list[int]:
    """Rounds after which a checkpoint was kept."""
    names = [name.split("/")[1] for name in seen.files if name.startswith("checkpoints/")]
    return sorted(int("".join(filter(str.isdigit, name.split(".")[0]))) for name in names)


def seen_pair(watcher: Watcher, name: str, key: Key) -> tuple[Seen, Seen]:
    """The two runs."""
    one, other = (watcher.see(f"{key.base} {name}={value}") for value in key.values)
    return one, other
