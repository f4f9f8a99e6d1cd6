"""Every option of every built-in component changes a run, and nothing before the link that it belongs to."""

from __future__ import annotations

import pytest
import torch

from fedmpi import components
from fedmpi.common.registry import KINDS
from fedmpi.data.schema import DataDescription
from fedmpi.models import build
from tests.keys.entries import ALL, SOME, STRATA, Key, S
from tests.keys.watched import Watcher, first_difference

RUN = [kind.name for kind in KINDS.values() if kind.modules and not kind.key.startswith("--") and not kind.late]
OORT = f"{S} clients.sampler=oort clients.count=4 rounds=4"
FEW = f"{OORT} clients.sampler.explore=0.25 clients.sampler.explore_least=0"
LARGEST = f"{S} clients.sampler=power-of-choice clients.count=3 rounds=1"
KRUM = f"{ALL} server.aggregator=krum attack=noise clients.attack_fraction=0.25 rounds=1"
BY_LABEL = f"{ALL} clients.availability=label-group"
ADAPTIVE = f"{SOME} server.optimizer.lr=0.02"


OPTIONS: dict[tuple[str, str], Key] = {
    ("digits", "clients"): Key(SOME, ("9", "12"), "cohort"),
    ("digits", "partition"): Key(SOME, ("iid", "dirichlet"), "rows"),
    ("digits", "alpha"): Key(SOME, ("0.3", "3"), "rows"),
    ("digits", "seed"): Key(SOME, ("0", "1"), "rows"),
    ("weighted", "replace"): Key(f"{S} clients.count=9", ("true", "false"), "cohort"),
    ("importance", "design"): Key(
        f"{S} clients.count=4 clients.sampler.features=full-gradient rounds=1",
        ("systematic", "sequential"),
        "cohort",
    ),
    ("stratified", "allocation"): Key(STRATA, ("equal", "proportional"), "strata"),
    ("stratified", "every_stratum"): Key(STRATA, ("true", "false"), "strata"),
    ("stratified", "within_stratum"): Key(f"{STRATA} rounds=1", ("uniform", "importance"), "cohort"),
    ("stratified", "design"): Key(f"{STRATA} rounds=1", ("systematic", "sequential"), "cohort"),
    ("power-of-choice", "candidates"): Key(LARGEST, ("3", "12"), "cohort"),
    ("oort", "explore"): Key(f"{OORT} clients.sampler.explore_least=0", ("0", "1"), "cohort"),
    ("oort", "explore_decay"): Key(
        f"{OORT} clients.sampler.explore=1 clients.sampler.explore_least=0", ("0", "1"), "cohort"
    ),
    ("oort", "explore_least"): Key(f"{OORT} clients.sampler.explore=0", ("0", "1"), "cohort"),
    ("oort", "cutoff"): Key(FEW, ("0", "1"), "cohort"),
    ("oort", "clip"): Key(FEW, ("0", "1"), "cohort"),
    ("oort", "stale"): Key(FEW, ("0", "1e9"), "cohort"),
    ("ratio", "ratio"): Key(SOME, ("0.25", "0.5"), "rows"),
    ("normalized", "population"): Key(SOME, ("samples", "clients"), "factors"),
    ("unbiased", "population"): Key(SOME, ("samples", "clients"), "factors"),
    ("literal", "population"): Key(SOME, ("samples", "clients"), "factors"),
    ("q-ffl", "q"): Key(SOME, ("0", "5"), "model"),
    ("q-ffl", "lipschitz"): Key(f"{SOME} rounds=1", ("20", "2000"), "model"),
    ("trimmed-mean", "trim"): Key(ALL, ("0", "0.4"), "model"),
    ("krum", "byzantine"): Key(f"{KRUM} server.aggregator.keep=3", ("0", "3"), "model"),
    ("krum", "keep"): Key(f"{KRUM} server.aggregator.byzantine=2", ("1", "6"), "model"),
    ("norm-clip", "bound"): Key(f"{SOME} server.weights=uniform rounds=1", ("0.02", "0.01"), "model"),
    ("feddyn", "alpha"): Key(f"{SOME} server.weights=uniform", ("0.1", "1"), "model"),
    ("label-smoothing", "smoothing"): Key(SOME, ("0", "0.5"), "model"),
    ("focal", "gamma"): Key(SOME, ("0", "4"), "model"),
    ("huber", "delta"): Key(
        "clients.sampler=all rounds=1 data.source=tests.tasks.worlds:numbers task.kind=regression",
        ("0.1", "5"),
        "model",
    ),
    ("top-k", "fraction"): Key(SOME, ("0.1", "0.2"), "model"),
    ("top-k", "k"): Key(f"{SOME} rounds=1", ("2", "3"), "record"),
    ("calibration-error", "bins"): Key(f"{SOME} rounds=1", ("1", "40"), "record"),
    ("bernoulli", "probability"): Key(ALL, ("0.3", "0.9"), "cohort"),
    ("label-group", "by_label"): Key(ALL, ("[1,1,1,1,1,0,0,0,0,0]", "[0,0,0,0,0,1,1,1,1,1]"), "cohort"),
    ("adam", "epsilon"): Key(f"{SOME} local.lr=0.01", ("1e-8", "1"), "model"),
    ("sgd", "momentum"): Key(SOME, ("0", "0.9"), "model"),
    ("sgd", "nesterov"): Key(f"{SOME} local.optimizer.momentum=0.9", ("false", "true"), "model"),
    ("sgd", "weight_decay"): Key(SOME, ("0", "0.1"), "model"),
    ("step", "every"): Key(f"{SOME} rounds=4", ("1", "2"), "model"),
    ("step", "factor"): Key(f"{SOME} rounds=4 local.schedule.every=1", ("0.5", "0.1"), "model"),
}
OPTIONS |= {
    (name, option): Key(
        ADAPTIVE.replace("server.optimizer.lr=0.02", "") if option == "lr" else ADAPTIVE, values, "model"
    )
    for option, values in {
        "lr": ("0.1", "0.05"),
        "beta1": ("0.9", "0.5"),
        "beta2": ("0.99", "0.5"),
        "tau": ("1e-3", "1"),
    }.items()
    for name in ("sgd", "momentum", "adagrad", "adam", "yogi")
}
LOCAL_ADAM = {
    "beta1": Key(f"{SOME} local.lr=0.01", ("0.9", "0.5"), "model"),
    "beta2": Key(f"{SOME} local.lr=0.01", ("0.999", "0.9"), "model"),
}


def options() -> list[tuple[str, str, str]]:
    """Return (kind, component, option) of all built-in components of a run except models."""
    return [(kind, part.name, option.name) for kind in RUN for part in components(kind) for option in part.options]


@pytest.mark.parametrize(("kind", "name", "option"), options())
def test_an_option_changes_a_run(kind: str, name: str, option: str, watcher: Watcher):
    key = OPTIONS[name, option]
    if kind == "local optimizer":
        key = LOCAL_ADAM.get(option, key)
    chooser = KINDS[kind].key
    base = f"{chooser}={name} {key.base}" if f"{chooser}=" not in key.base else key.base
    one, other = (watcher.see(f"{base} {chooser}.{option}={value}") for value in key.values)
    assert not one.refusal and not other.refusal, one.refusal or other.refusal
    assert first_difference(one, other) == key.first


SMALL = {
    "mlp": {"hidden": [6]},
    "cnn": {"dense": 8},
    "cifar-cnn": {"hidden": 8},
    "image-cnn": {"filters": [2, 3], "hidden": [4, 5]},
    "resnet18": {"width": 8, "groups": 2},
    "text-cnn": {"dimension": 4, "filters": 3, "widths": [2, 3]},
    "fedsampling-text-cnn": {"dimension": 4, "filters": 3, "hidden": [5]},
    "transformer": {"dimension": 4, "heads": 2, "head_size": 3, "hidden": [5]},
    "lstm": {"dimension": 4, "units": 3},
    "char-lstm": {"dimension": 4, "units": 3, "layers": 1},
}
OTHERWISE = {
    "hidden": {"cifar-cnn": 9, "": [7]},
    "activation": {"": "tanh"},
    "dropout": {"": 0.33},
    "dense": {"": 9},
    "dense_dropout": {"": 0.33},
    "filters": {"image-cnn": [2, 4], "": 5},
    "width": {"resnet18": 16, "": 2},
    "groups": {"": 4},
    "dimension": {"": 5},
    "widths": {"": [2, 4]},
    "heads": {"": 3},
    "head_size": {"": 4},
    "units": {"": 5},
    "layers": {"": 2},
}
GRAY, COLORED = (DataDescription((c, s, s), "uint8", 10, "image", 0, (), ()) for c, s in ((1, 28), (3, 32)))
IMAGES = {"cifar-cnn": COLORED, "resnet18": COLORED}
TEXTS = DataDescription((12,), "int32", 3, "text", 40, (), ())


@pytest.mark.parametrize(
    ("name", "option"),
    [(part.name, o.name) for part in components("model") for o in part.options if o.name in OTHERWISE],
)
def test_an_option_changes_the_model(name: str, option: str):
    data = TEXTS if "dimension" in SMALL[name] else IMAGES.get(name, GRAY)
    changed = {**SMALL[name], option: OTHERWISE[option].get(name, OTHERWISE[option].get(""))}
    found = []
    for options in (SMALL[name], changed):
        module = build(name, options, data, 0).train()
        torch.manual_seed(0)
        x = torch.randint(1, 40, (4, 12)) if data is TEXTS else torch.randn(4, *data.feature_shape)
        found.append((str(module), sum(p.numel() for p in module.parameters()), module(x).detach()))
    assert found[0][:2] != found[1][:2] or not torch.equal(found[0][2], found[1][2])
