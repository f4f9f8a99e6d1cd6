"""Options of the user's own parts that bear the names of fedmpi's keys: theirs, where fedmpi's mean nothing."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi import Cohort, Config, UserError
from fedmpi.config import build_config, config_toml, load_config
from fedmpi.config.layers import remarks
from fedmpi.config.loading import given_config
from fedmpi.config.writing import differences, flat_table, is_default
from fedmpi.sweeps.plan import plan_sweep
from fedmpi.testing.check import Subject
from fedmpi.testing.kit import part_of
from tests.mpi.commands import run_commands
from tests.mpi.launch import LIMIT

PARTS = """
from typing import Any, Literal, Optional

import numpy as np
import torch

import fedmpi
from fedmpi import Cohort, LocalAlgorithm, client_sampler, aggregator, data_sampler, server_optimizer, weights

GIVEN = {}


@client_sampler
def named(
    view,
    *,
    strata: str = "few",
    xi: float = -3.0,
    draw: Literal["first", "last"] = "first",
    opening: bool = False,
    levels: tuple[int, ...] = (1, 2),
    noise: Optional[float] = None,
) -> Cohort:
    GIVEN["named"] = dict(strata=strata, xi=xi, draw=draw, opening=opening, levels=levels, noise=noise)
    return Cohort(view.available[:3] if draw == "first" else view.available[-3:])


@client_sampler
class Any_:
    def __init__(self, *, replace: str = "no", **options):
        self.given = dict(replace=replace, **options)

    def draw(self, view):
        GIVEN["Any_"] = self.given
        return Cohort(view.available[:2])


@client_sampler(needs=("strata",))
def by_strata(view, *, strata: int = 3, every_stratum: str = "no", **options) -> Cohort:
    GIVEN["by_strata"] = dict(strata=strata, every_stratum=every_stratum, **options)
    return Cohort(view.available[:2])


@client_sampler
def of_its_own_name(view, *, clients: str = "all") -> Cohort:
    return Cohort(view.available[:2])


@client_sampler
def counted_by_its_own_name(view, *, clients: int = 2) -> Cohort:
    return Cohort(view.available[:clients])


@data_sampler
def rows(client, *, ratio: str = "half", epsilon: float = -1.0, clip: float = 2.0, wanted: int = 7):
    GIVEN["rows"] = dict(ratio=ratio, epsilon=epsilon, clip=clip, wanted=wanted)
    return np.arange(3)


@data_sampler
def any_rows(client, **options):
    GIVEN["any_rows"] = options
    return np.arange(3)


@weights(per_sample=False, normalized=True)
def weighing(cohort, sizes, *, tau: str = "t", population: int = 3):
    GIVEN["weighing"] = dict(tau=tau, population=population)
    return np.ones(len(cohort.clients))


@aggregator
def combining(updates, coefficients, *, beta1: str = "b"):
    GIVEN["combining"] = dict(beta1=beta1)
    return updates.mean(0)


@server_optimizer
def stepping(w, update, *, lr: str = "0.5", beta2: tuple[float, float] = (2.0, 3.0), population: str = "all") -> None:
    GIVEN["stepping"] = dict(lr=lr, beta2=beta2, population=population)
    w.add_(update, alpha=float(lr))


@server_optimizer
def any_step(w, update, *, momentum: float = 0.1, **options) -> None:
    GIVEN["any_step"] = dict(momentum=momentum, **options)
    w.add_(update)


class Algorithm(LocalAlgorithm):
    def __init__(self, *, beta1: int = 5, epsilon: str = "e"):
        super().__init__()
        GIVEN["Algorithm"] = dict(beta1=beta1, epsilon=epsilon)


class AnyAlgorithm(LocalAlgorithm):
    def __init__(self, **options):
        super().__init__()
        GIVEN["AnyAlgorithm"] = options


class Rated(LocalAlgorithm):
    def __init__(self, *, lr: str = "fast"):
        super().__init__()


def local_step(parameters, lr, *, beta1: float = -2.0, epsilon: bool = True):
    GIVEN["local_step"] = dict(beta1=beta1, epsilon=epsilon)
    return torch.optim.SGD(parameters, lr=lr)


def loss(outputs, targets, *, kind: str = "hinge", gamma: str = "g"):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def law(view, *, probability: str = "high", by_label: int = 3, lowest: float = -1.0):
    GIVEN["law"] = dict(probability=probability, by_label=by_label, lowest=lowest)
    return np.ones(len(view.sizes))


def groups(class_counts, most, generator, target, *, kind: str = "alike", first: bool = True):
    GIVEN["groups"] = dict(kind=kind, first=first)
    return np.arange(len(class_counts)) // most


def network(description, *, lora: bool = False):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def network_of_a_name(description, *, name: str):
    return network(description)


def dealt(labels, clients, generator, **options):
    return generator.integers(0, clients, len(labels))


def data(*, verify: bool = True, clients: str = "5", partition: int = 3) -> fedmpi.ClientArrays:
    GIVEN["data"] = dict(verify=verify, clients=clients, partition=partition)
    draws = np.random.default_rng(0)
    x, y = draws.standard_normal((60, 8)).astype(np.float32), draws.integers(0, 3, 60)
    return fedmpi.ClientArrays(x, y, np.arange(60) % int(clients), test=(x, y))
"""
MODULE = "parts_with_names_of_keys"
ONE = {"rounds": 1, "clients.count": 3, "local.engine": "sequential", "logging.tensorboard": False}
ON_ASTRAEA = {"rounds": 1, "clients.count": 3, "logging.tensorboard": False}
Given = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("own")
    (found / f"{MODULE}.py").write_text(PARTS)
    return found


@pytest.fixture(autouse=True)
def given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    """What the parts were given since the test began, by the part's name."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    __import__(MODULE)
    sys.modules[MODULE].GIVEN.clear()  # type: ignore[attr-defined]
    yield sys.modules[MODULE].GIVEN  # type: ignore[attr-defined]


def own(name: str) -> str:
    return f"{MODULE}:{name}"


def as_table(keys: dict[str, Any], preset: str) -> dict[str, Any]:
    table: dict[str, Any] = {"preset": preset}
    for key, value in keys.items():
        name, dot, inner = key.partition(".")
        if dot:
            table.setdefault(name, {})[inner] = value
        else:
            table[name] = value
    return table


def toml(table: dict[str, Any]) -> str:
    """A file with keys in one line each, and no table within a table."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in inner.items())]
    return "\n".join(lines)


NAMED = {"clients.sampler": own("named")}
THEIRS: dict[str, tuple[str, dict[str, Any], Given]] = {
    "defaults": (
        "fedavg",
        NAMED,
        {"named": {"strata": "few", "xi": -3.0, "draw": "first", "opening": False, "levels": (1, 2), "noise": None}},
    ),
    "sampler": (
        "fedavg",
        NAMED
        | {f"participation.{key}": value for key, value in (("strata", "many"), ("xi", -7), ("draw", "last"))}
        | {
            "clients.sampler.initial_step": True,
            "clients.sampler.features.codebook_size": [4, 5, 6],
            "clients.sampler.clustering.outliers": 0.5,
        },
        {"named": {"strata": "many", "xi": -7.0, "draw": "last", "opening": True, "levels": (4, 5, 6), "noise": 0.5}},
    ),
    "sampler, a preset's replaced": (
        "fedstas",
        NAMED | {"server.weights": "samples"},
        {"named": {"strata": "few", "xi": -3.0, "draw": "first", "opening": False, "levels": (1, 2), "noise": None}},
    ),
    "any": (
        "fedavg",
        {"clients.sampler": own("Any_"), "clients.sampler.replace": "yes", "clients.sampler.strata": "many"}
        | {"clients.sampler.initial_step": True, "clients.sampler.share": 0.5},
        {"Any_": {"replace": "yes", "strata": "many", "opening": True, "share": 0.5}},
    ),
    "any, a preset's replaced": (
        "fedstas",
        {"clients.sampler": own("Any_"), "server.weights": "samples"},
        {"Any_": {"replace": "no"}},
    ),
    "what it needs is fedmpi's": (
        "fedavg",
        {"clients.sampler": own("by_strata"), "clients.sampler.strata": 4, "clients.sampler.every_stratum": "yes"}
        | {"clients.sampler.features": "label-histogram", "clients.sampler.replace": "any"},
        {"by_strata": {"strata": 4, "every_stratum": "yes", "replace": "any"}},
    ),
    "rows": (
        "fedavg",
        {
            "samples.sampler": own("rows"),
            "samples.sampler.ratio": "third",
            "samples.size.epsilon": -4.5,
            "samples.budget": 5,
        },
        {"rows": {"ratio": "third", "epsilon": -4.5, "clip": 2.0, "wanted": 5}},
    ),
    "any rows": (
        "fedavg",
        {
            "samples.sampler": own("any_rows"),
            "samples.size.query": "nobody",
            "samples.size.clip": 3,
            "samples.budget": 9,
        },
        {"any_rows": {"asked": "nobody", "clip": 3}},
    ),
    "several of a table": (
        "fedavg",
        {"server.weights": own("weighing"), "server.optimizer": own("any_step")}
        | {"server.aggregator": own("combining"), "server.optimizer.tau": "x", "server.optimizer.beta1": "y"}
        | {"server.optimizer.lr": "free", "server.aggregator.momentum": 0.7},
        {
            "weighing": {"tau": "x", "population": 3},
            "combining": {"beta1": "y"},
            "any_step": {"momentum": 0.7, "lr": "free"},
        },
    ),
    "server optimizer": (
        "fedadam",
        {"server.optimizer": own("stepping"), "server.optimizer.lr": "0.25", "server.weights.population": "some"},
        {"stepping": {"lr": "0.25", "beta2": (2.0, 3.0), "population": "some"}},
    ),
    "any server optimizer, a preset's replaced": (
        "fedadam",
        {"server.optimizer": own("any_step")},
        {"any_step": {"momentum": 0.1}},
    ),
    "algorithm": (
        "fedavg",
        {"local.algorithm": own("Algorithm"), "local.optimizer.beta1": 7},
        {"Algorithm": {"beta1": 7, "epsilon": "e"}},
    ),
    "any algorithm, a preset's replaced": (
        "feddyn",
        {"local.algorithm": own("AnyAlgorithm"), "local.optimizer.epsilon": "small"},
        {"AnyAlgorithm": {"epsilon": "small"}},
    ),
    "local optimizer": (
        "fedavg",
        {"local.optimizer": own("local_step"), "local.optimizer.beta1": -5, "local.optimizer.epsilon": False},
        {"local_step": {"beta1": -5.0, "epsilon": False}},
    ),
    "law": (
        "fedavg",
        {
            "clients.availability": own("law"),
            "clients.availability.probability": "low",
            "clients.availability.by_label": 5,
        },
        {"law": {"probability": "low", "by_label": 5, "lowest": -1.0}},
    ),
    "data": (
        "fedavg",
        {"data.source": own("data"), "data.source.clients": "6", "data.verify": False},
        {"data": {"verify": False, "source.clients": "6", "source.partition": 3}},
    ),
    "groups": (
        "astraea",
        {"topology.scheduling": own("groups"), "topology.first": False},
        {"groups": {"kind": "mediators", "first": False}},
    ),
}


NEARLY_ANOTHER = (
    "sampler",
    "sampler, a preset's replaced",
    "any, a preset's replaced",
    "rows",
    "any rows",
    "any server optimizer, a preset's replaced",
    "any algorithm, a preset's replaced",
    "local optimizer",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in NEARLY_ANOTHER else ()) for name in THEIRS]
)
def test_a_part_is_given_its_options_however_they_are_set(name: str, given: Given, tmp_path: Path) -> None:
    preset, keys, expected = THEIRS[name]
    keys = (ON_ASTRAEA if preset == "astraea" else ONE) | keys
    table, written = as_table(keys, preset), tmp_path / "run" / "config.toml"
    (tmp_path / "mine.toml").write_text(toml(table))
    settings = [f"preset={preset}", *(f"{key}={json.dumps(value)}" for key, value in keys.items())]
    ways: dict[str, Callable[[], Any]] = {
        "keys": lambda: fedmpi.run(preset, keys, out=tmp_path / "run"),
        "a file": lambda: fedmpi.run(tmp_path / "mine.toml"),
        "--set": lambda: fedmpi.run(load_config(None, settings)),
        "a Config": lambda: fedmpi.run(Config(**table)),
        "its own file": lambda: fedmpi.run(written),
        "its own file, overridden": lambda: fedmpi.run(Config.load(written), {"seed": 3}),
        "resumed by keys": lambda: fedmpi.run(preset, keys | {"rounds": 2}, out=tmp_path / "run", resume=True),
        "resumed by its own file": lambda: fedmpi.run(written, {"rounds": 3}, out=tmp_path / "run", resume=True),
    }
    for way, run in ways.items():
        given.clear()
        run()
        assert given == expected, way
    if expected.get("named", {}).get("draw"):
        chosen = (0, 3) if expected["named"]["draw"] == "first" else (17, 20)
        run = fedmpi.run(preset, keys | {"logging.participants": True})
        assert run.records[0]["clients"] == f"{chosen[0]}-{chosen[1] - 1}"


@pytest.mark.parametrize("name", THEIRS)
def test_a_configuration_with_them_is_one_value(name: str) -> None:
    preset, keys, _ = THEIRS[name]
    config = given_config(preset, keys)
    text = config_toml(config)
    table = tomllib.loads(text)
    for again in (
        build_config([("config.toml", table)]),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        config.model_copy(),
        given_config(config, {"seed": config.seed}),
    ):
        assert again == config and config_toml(again) == text and differences(table, again) == []
        assert again.clients.sampler.options == config.clients.sampler.options


def test_what_is_given_for_them_stays_apart_from_fedmpis_keys() -> None:
    one = Config(clients={"sampler": own("named"), "count": 2, "sampler.strata": "many", "sampler.initial_step": True})
    other = Config(
        clients={"sampler": own("named"), "count": 2, "sampler.strata": "some", "sampler.initial_step": True}
    )
    table = one.participation
    assert (table.strata, table.opening) == (10, False), "what fedmpi would read has its default"
    assert table.own_options == {"strata": "many", "opening": True}
    assert one != other and "many" in repr(one)
    assert table.model_dump(exclude_unset=True) == {"clients": own("named"), "count": 2} | table.own_options
    assert Config(participation=table) == one == given_config(one, {})
    assert type(table)(clients=own("named"), count=2, strata="many", opening=True) == table
    assert not is_default(
        Config(clients={"sampler": own("Any_"), "count": 2, "sampler.strata": 10}), "clients.sampler.strata"
    )
    text = config_toml(one)
    assert 'strata = "many"' in text and "opening = true" in text
    without = tomllib.loads(text.replace('strata = "many"\n', ""))
    assert [key for key, *_ in differences(without, one)] == ["clients.sampler.strata"]


def test_keys_that_no_part_has_mean_nothing_beside_one_of_ones_own() -> None:
    sentence = r'^clients.sampler.clustering .*means nothing here: it needs clients.sampler = "stratified"'
    with pytest.raises(UserError, match=sentence):
        given_config("fedavg", NAMED | {"clients.sampler.clustering": "optics"})
    with pytest.raises(UserError, match=r"^clients.sampler.strta .*did you mean clients.sampler.strata\?"):
        given_config("fedavg", NAMED | {"clients.sampler.strta": "many"})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("draw", "middle", "input should be 'first' or 'last'"),
        ("levels", ["x"], "input should be a valid integer, .*"),
        ("xi", "steep", "input should be a valid number, .*"),
        ("strata", 3, "input should be a valid string"),
        ("opening", 1, "give true or false, not a number"),
        ("xi", True, "give a number, not true or false"),
        ("levels", [1, True], "give a number, not true or false"),
        ("noise", False, "give a number, not true or false"),
    ],
)
def test_only_the_annotation_says_what_they_take(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=rf"^participation.{key} = .* does not suit {own('named')}: {words}$"):
        given_config("fedavg", NAMED | {f"participation.{key}": value})


def test_what_a_complete_configuration_holds_for_one_part_reaches_no_other() -> None:
    named = given_config("fedavg", NAMED | {"clients.sampler.strata": "many", "clients.sampler.within_stratum": "last"})
    any_ = given_config(
        "fedavg", {"clients.sampler": own("Any_"), "clients.sampler.strata": "many", "clients.sampler.share": 0.5}
    )
    for before in (named, any_):
        for sampler, expected in {
            "uniform": {},
            "stratified": {"strata": 10, "draw": "importance"},
            own("named"): {"strata": "few", "draw": "first"},
            own("Any_"): {"replace": "no"},
            own("by_strata"): {"strata": 3, "every_stratum": "no"},
        }.items():
            after = given_config(before, {"clients.sampler": sampler})
            if sampler == before.participation.clients:
                assert after == before
            else:
                found = flat_table(after)
                assert {key: found[f"participation.{key}"] for key in expected} == expected
                assert "many" not in str(found) and "clients.sampler.share" not in found


def test_an_option_that_a_built_in_part_has_too_is_shared(given: Given) -> None:
    both = {"server.optimizer": own("stepping"), "server.weights": "unbiased", "clients.count": 3}
    config = given_config("fedavg", both | {"server.weights.population": "clients"})
    assert config.aggregation.population == "clients" and config.aggregation.own_options.keys() == {"lr", "beta2"}
    assert config.server.optimizer.options["population"] == config.server.weights.options["population"] == "clients"
    with pytest.raises(UserError, match=rf"population = 'some' .*'samples' or 'clients'; {own('stepping')} has an opt"):
        given_config("fedavg", both | {"server.weights.population": "some"})
    alone = given_config(config, {"server.weights": "uniform"})
    assert alone.server.optimizer.options["population"] == "clients", "as it was for this part"
    adam = {"local.algorithm": own("Algorithm"), "local.optimizer": "adam", "local.optimizer.beta1": 0.5}
    with pytest.raises(
        UserError, match=rf"local.optimizer.beta1 = 0.5 does not suit {own('Algorithm')}: .*Adam: decay of the f"
    ):
        given_config("fedavg", adam)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"local.algorithm": own("Rated"), "local.lr": 0.25},
            rf"^local.lr = 0.25 does not suit {own('Rated')}: input should be a valid string; {own('Rated')} has an "
            r"option of this name, which is a key of fedmpi's \(Learning rate η of round 0\): give it another one$",
        ),
        ({"task.loss": own("loss")}, r"^task.kind = 'hinge': input should be .*; .*:loss has an option of this name"),
        (
            {"clients.sampler": own("counted_by_its_own_name")},
            r"^clients.sampler = '.*:counted_by_its_own_name' has an option of the name of this key: give it ano",
        ),
        (
            {"clients.sampler": own("of_its_own_name")},
            r"^clients.sampler = '.*:of_its_own_name' has an option of the name of this key: give it another on",
        ),
        (
            {"model.name": own("network"), "model.lora": True},
            r"^model.lora = True .*valid dictionary.*; .*:network has an option of this name, .*: give it another one$",
        ),
        (
            {"model.name": own("network_of_a_name"), "rounds": 1},
            r"^model.name = '.*:network_of_a_name' has an option of the name of this key: give it another one$",
        ),
    ],
)
def test_an_option_that_cannot_take_a_common_key_is_to_have_another_name(keys: Given, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        fedmpi.run("fedavg", keys)


class Bound:
    """A sampler that is made anew for every run."""

    def __init__(self, *, strata: str = "few", xi: float | None = 2.0):
        self.strata, self.xi = strata, xi

    def draw(self, view: Any) -> Cohort:
        return Cohort(view.available[:2])


@pytest.mark.parametrize("sampler", [Bound(strata="many"), partial(Bound, strata="many")])
def test_objects_hold_them_too(sampler: Any) -> None:
    for preset, beside in (("fedavg", {}), ("fedstas", {"server.weights": "samples"})):
        config = given_config(preset, {"clients.sampler": sampler, **beside})
        assert config.clients.sampler.options == {"strata": "many", "xi": 2.0}
        table = tomllib.loads(config_toml(config))["participation"]
        assert (table["clients"], table["strata"]) == (f"{__name__}:Bound", "many")
        beside_it = given_config(preset, {"clients.sampler": sampler, "clients.sampler.strata": "key", **beside})
        assert beside_it.clients.sampler.options["strata"] == "key"


def test_a_key_beside_a_bound_option_of_its_name_is_what_is_written() -> None:
    bound = partial(getattr(sys.modules[MODULE], "local_step"), beta1=-5.0)  # noqa: B009
    for beside, expected in (({}, -5.0), ({"local.optimizer.beta1": -7}, -7.0)):
        config = given_config("fedavg", {"local.optimizer": bound, **beside})
        table = tomllib.loads(config_toml(config))
        assert (table["local"]["optimizer"], table["local"]["beta1"]) == (own("local_step"), expected)
        for again in (config, Config.exactly(table)):
            assert again.local.optimizer.component.checked(again.local.optimizer.options)["beta1"] == expected


def test_none_in_the_place_of_another_default_is_reported() -> None:
    none = given_config("fedavg", {"clients.sampler": Bound, "clients.sampler.clustering.xi": None})
    assert none.clients.sampler.options["xi"] is None
    assert [sentence.partition(",")[0] for sentence in not_repeatable(none)] == [
        "clients.sampler.clustering.xi is None"
    ]
    assert not_repeatable(given_config("fedavg", {"clients.sampler": Bound})) == []
    any_ = given_config("fedavg", {"clients.sampler": own("Any_"), "clients.sampler.strata": None})
    assert [sentence.partition(",")[0] for sentence in not_repeatable(any_)] == ["clients.sampler.strata is None"]
    as_default = given_config("fedavg", NAMED | {"clients.sampler.clustering.outliers": None})
    assert not_repeatable(as_default) == []


def test_a_sweep_may_go_through_them(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'preset = "fedstas"\naggregation.weights = "samples"\nparticipation.clients = "{own("named")}"\n'
        '[sweep]\nparticipation.strata = ["many", "some"]\nparticipation.xi = [-1, -2.5]\n'
    )
    runs = plan_sweep(path, tmp_path / "out").runs
    found = [run.config.clients.sampler.options for run in runs]
    assert [(one["strata"], one["xi"]) for one in found] == [
        (strata, xi) for strata in ("many", "some") for xi in (-1.0, -2.5)
    ]


def test_a_preset_in_whose_place_they_are_is_remarked() -> None:
    config = given_config("fedadam", {"server.optimizer": own("stepping"), "server.optimizer.lr": "0.25"})
    expected = "preset fedadam with other parts: server.optimizer.lr = 0.25 (0.01 was for adam)"
    assert remarks(flat_table(config))[-1].startswith(expected)


def test_a_check_of_a_part_gives_it_no_key_of_fedmpis() -> None:
    settings = {"clients.count": 3, "clients.sampler.strata": "many", "clients.sampler.share": 1}
    assert Subject(part_of(own("Any_")), settings).options == {"strata": "many", "share": 1}
    assert Subject(part_of(own("by_strata")), settings).options == {"strata": "many", "share": 1}
    assert Subject(part_of(own("dealt"), "partition"), {"strata": 3, "share": 1}).options == {"strata": 3, "share": 1}


@pytest.mark.slow
def test_commands_and_ranks_do_the_same(folder: Path, tmp_path: Path) -> None:
    keys = ["preset=fedavg", "rounds=2", "cluster.threads=1", "server.exact=true", "logging.tensorboard=false"]
    keys += [f"clients.sampler={own('named')}", "clients.sampler.strata=many", "clients.sampler.within_stratum=last"]
    words = [word for key in [*keys, "logging.participants=true"] for word in ("--set", key)]

    def train(out: str, *further: str) -> list[str | Path]:
        return ["train", *words, *(word for key in further for word in ("--set", key)), "--out", tmp_path / out]

    wrong = {"rounds": "true", "clients.sampler.clustering.xi": "true", "clients.sampler.initial_step": "0"}
    alone = {"show": ["show", *words]} | {key: train("none", f"{key}={value}") for key, value in wrong.items()}
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    done = run_commands(None, alone | {"run": train("alone")}, tmp_path / "one", LIMIT, cwd=folder)
    assert (done["show"].returncode, done["run"].returncode) == (0, 0) and 'strata = "many"' in done["show"].stdout
    for key, value in wrong.items():
        assert done[key].returncode == 2 and f"error: {key} = {value.title()} " in done[key].stderr
        assert done[key].stderr.count("\n") == 1
    together = {
        "run": train("ranks", "checkpoint.every=1"),
        "other": [*train("ranks", "rounds=3", "clients.sampler.strata=some"), "--resume"],
        "further": [*train("ranks", "rounds=3"), "--resume"],
    }
    done = run_commands(3, together, tmp_path / "three", LIMIT, cwd=folder)
    assert [done[name].returncode for name in together] == [0, 2, 0], done
    assert "clients.sampler.strata: 'many' there, 'some' here" in done["other"].stderr
    one, three = (fedmpi.load_run(tmp_path / name).records for name in ("alone", "ranks"))
    assert [record["clients"] for record in three] == ["17-19"] * 3
    assert [record["test_loss"] for record in one] == [record["test_loss"] for record in three[:2]]
