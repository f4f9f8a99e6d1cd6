"""A sweep's file: its runs, their names and numbers, their shards, files laid over others, and errors."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedmpi import ClientArrays, UserError
from fedmpi.config import load_config
from fedmpi.sweeps.plan import PlannedRun, Sweep, plan_sweep

COUNT = {"clients": {"count": 5}}


def planned(text: str, folder: Path, settings: tuple[str, ...] = ()) -> Sweep:
    path = folder / "mine.toml"
    path.write_text("clients.count = 5\n" + text)
    return plan_sweep(path, folder / "out", settings)


def named(sweep: Sweep) -> dict[str, PlannedRun]:
    return {run.name: run for run in sweep.runs}


def test_lists_are_crossed_and_seeds_vary_slowest(tmp_path: Path) -> None:
    sweep = planned(
        'rounds = 7\n[sweep]\npreset = ["fedavg", "fedadam"]\nseed = [3, 1]\nlocal.lr = [0.1, 0.5]', tmp_path
    )
    expected = [(seed, preset, lr) for seed, preset, lr in product((3, 1), ("fedavg", "fedadam"), (0.1, 0.5))]
    assert [(run.config.seed, run.config.preset, run.config.local.lr) for run in sweep.runs] == expected
    assert [run.index for run in sweep.runs] == list(range(8))
    assert sweep.runs[0].name == "fedavg,lr=0.1,seed=3"
    assert sweep.runs[0].folder == tmp_path / "out" / "fedavg,lr=0.1,seed=3"
    assert sweep.runs[5].labels == {"preset": "fedavg", "seed": 1, "local.lr": 0.5}
    given = ["preset=fedadam", "rounds=7", "seed=1", "local.lr=0.5", "clients.count=5"]
    assert sweep.runs[7].config == load_config(None, given), "as fedmpi train would have it"


VARIANTS = """
[local]
epochs = 1
[sweep]
seed = [0, 1]
local.epochs = [1, 2]
[[sweep.run]]
name = "plain one"
preset = "fedavg"
[[sweep.run]]
name = "by steps"
preset = "fedavg"
local.steps = 9
[[sweep.run]]
name = "Prox"
preset = "fedprox"
local.proximal_mu = [0.1, 1.0]
seed = [0]
"""


def test_variants_replace_lists_and_cross_the_lists_within_them(tmp_path: Path) -> None:
    runs = named(planned(VARIANTS, tmp_path))
    plain = [f"plain-one,epochs={epochs},seed={seed}" for seed in (0, 1) for epochs in (1, 2)]
    prox = [f"Prox,epochs={epochs},proximal_mu={mu},seed=0" for epochs in (1, 2) for mu in (0.1, 1.0)]
    assert set(runs) == {*plain, *prox, "by-steps,seed=0", "by-steps,seed=1"}
    assert runs["by-steps,seed=1"].config.local.steps == 9 and runs["by-steps,seed=1"].config.local.epochs is None
    assert runs["Prox,epochs=2,proximal_mu=1.0,seed=0"].config.local.proximal_mu == 1.0
    assert runs["plain-one,epochs=2,seed=0"].labels == {"run": "plain one", "seed": 0, "local.epochs": 2}


def test_several_lists_of_variants_are_crossed(tmp_path: Path) -> None:
    lists = {
        "run": [{"name": "A", "preset": "fedavg"}, {"name": "P", "preset": "fedprox"}],
        "size": [{"name": "small", "model.hidden": [[8]]}, {"name": "large", "model": {"hidden": [[64, 64]]}}],
    }
    sweep = plan_sweep({**COUNT, "sweep": lists}, tmp_path)
    expected = [f"{one},{two},hidden={size}" for one in "AP" for two, size in (("small", "8"), ("large", "64-64"))]
    assert [run.name for run in sweep.runs] == expected
    assert sweep.runs[3].config.model.options == {"hidden": [64, 64]}, "a list of lists holds values that are lists"


def test_settings_of_the_command_line_override_the_file(tmp_path: Path) -> None:
    sweep = planned(VARIANTS, tmp_path, ("seed=4", "local.lr=0.3"))
    assert {(run.config.seed, run.config.local.lr) for run in sweep.runs} == {(4, 0.3)}
    prox = [f"Prox,epochs={epochs},proximal_mu={mu}" for epochs in (1, 2) for mu in (0.1, 1.0)]
    assert set(named(sweep)) == {"plain-one,epochs=1", "plain-one,epochs=2", "by-steps", *prox}
    lists = "[sweep]\nlocal.epochs = [1, 2]\nseed = [0, 1]"
    assert set(named(planned(lists, tmp_path, ("local.steps=5",)))) == {"seed=0", "seed=1"}
    crossed = '[[sweep.run]]\nname = "a"\nlocal.epochs = [1, 2]'
    assert set(named(planned(crossed, tmp_path, ("local.steps=5",)))) == {"a"}, "of a variant, too"


def test_names_are_fit_for_folders(tmp_path: Path) -> None:
    [run] = plan_sweep({**COUNT, "sweep": {"run": [{"name": "FedAvg, E = 2/α: *?"}]}}, tmp_path).runs
    assert run.name == "FedAvg-E-2-α"
    both = plan_sweep({**COUNT, "sweep": {"local.lr": [0.1, 1e-5], "server.optimizer.lr": [1.0]}}, tmp_path)
    assert [run.name for run in both.runs] == [f"local.lr={lr},server.optimizer.lr=1.0" for lr in ("0.1", "1e-05")]


SHARDS = """
[prepare]
dataset = "digits"
clients = 8
[prepare.iid]
partition = "iid"
[prepare.skewed]
partition = "dirichlet"
alpha = 0.3
seed = "{seed}"
"""


def test_shards_are_described_once_and_named_by_what_they_depend_on(tmp_path: Path) -> None:
    sweep = planned(
        SHARDS + '[sweep]\npreset = ["fedavg", "fedprox"]\nseed = [0, 1]\ndata.source = ["iid", "skewed"]', tmp_path
    )
    shards = {run.name: run.data for run in sweep.runs}
    assert len({data.folder for data in shards.values() if data}) == 3, "iid for all, skewed for each seed"
    skewed = shards["fedprox,skewed,seed=1"]
    assert skewed is not None and skewed.folder == tmp_path / "out" / "shards" / "skewed,seed=1"
    assert skewed.words == ("digits", "--clients", "8", "--partition", "dirichlet", "--alpha", "0.3", "--seed", "1")
    assert named(sweep)["fedprox,skewed,seed=1"].config.data.source.choice == str(skewed.folder)
    alone = 'seed = 1\n[prepare]\ndataset = "digits"\npartition = "iid"\nseed = "{seed}"\n'
    [run] = planned(alone, tmp_path, ("seed=7",)).runs
    assert run.data is not None and run.data.words[-2:] == ("--seed", "7") and run.data.folder.name == "digits,seed=7"
    crossed = '[prepare]\ndataset = "digits"\npartition = "dirichlet"\n[sweep]\nprepare.alpha = [0.1, 10.0]\n'
    folders = {run.name: run.data.folder.name for run in planned(crossed, tmp_path).runs if run.data}
    assert folders == {f"alpha={alpha}": f"digits,alpha={alpha}" for alpha in (0.1, 10.0)}


WRONG: list[tuple[str, str]] = [
    ("[swep]\nseed = [1]", "unknown key swep in {}; did you mean sweep?"),
    ("[sweep]\nsed = [1]", "did you mean seed?"),
    ("[sweep]\nlocal.lrr = [0.1]", "did you mean local.lr?"),
    ("[sweep]\nlocal.lr = 0.1", "Write a list of values"),
    ("[sweep]\nseed = []", "Write a list of values"),
    ("[sweep]\nseed = [1, 1]", "run seed=1: another run"),
    ("sweep = 3", "sweep is a table of keys. Write [sweep]"),
    ("[[sweep.run]]\npreset = 'fedavg'", "[[sweep.run]] needs a name"),
    ("[[sweep.run]]\nname = 'a'\n[[sweep.run]]\nname = 'a'\nrounds = 3", "needs a name of its own, not 'a'"),
    ("[[sweep.run]]\nname = 'a'\ndrop = true", "'a' is not in the base"),
    ("[sweep]\nlocal.lr = [0.1, -1.0]", "run lr=-1.0: local.lr"),
    ("[sweep]\nattack = ['none', {name = 'noise', scale = -1.0}]", "run attack=noise,scale=-1.0: attack.scale"),
    ("[sweep]\npreset = ['fedavg', 'fedagv']", "did you mean fedavg?"),
    ("[[sweep.run]]\nname = 'a b'\n[[sweep.run]]\nname = 'a-b'\nrounds = 3", "run a-b: another run"),
    ("[[sweep.run]]\nname = 'shards'", "or the shards already use the folder"),
    ("[[sweep.run]]\nname = 'a'\nrounds = 3\n[[sweep.x]]\nname = 'b'\nrounds = 4", "rounds is set by each of a and b"),
    ("data = 3\n[sweep]\ndata.source = ['digits']", "data is a table of keys"),
    ("[sweep]\nprepare.alpha = [1.0]", "prepare.alpha has no effect, since the run uses no [prepare] table"),
    ("[prepare]\ndataset = 'digits'", '[prepare] needs partition = "NAME"'),
    ("[prepare.a]\ndataset = 'digits'\npartition = 'iid'", "[prepare] is unused. Name one of its tables"),
    ('[sweep]\nmodel = ["mlp", "mpl"]', "mpl"),
    ('[sweep]\nmodel = ["mlp"]\n"model.hidden" = ["wide"]', "model.hidden = 'wide' does not suit mlp"),
    ('[sweep]\nmodel = ["nowhere.at_all:network"]', "nowhere"),
    ("[sweep]\nmodel = ['mlp', {name = 'mlp', hiden = [3]}]", "did you mean hidden"),
    ("base = 3", "cannot read the configuration"),
    ('base = "none.toml"', "cannot read the configuration"),
    ('base = "mine.toml"', "is its own base"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_a_wrong_file_is_rejected_in_a_sentence_with_the_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        planned(text, tmp_path)
    assert said.format(tmp_path / "mine.toml") in str(raised.value) and "\n" not in str(raised.value)


def test_fedmpi_train_names_the_command_for_a_sweep(tmp_path: Path) -> None:
    for text in ("[sweep]\nseed = [0, 1]", 'base = "whole.toml"'):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(UserError, match=r"describes a sweep of many runs. Start it with fedmpi sweep .*mine.toml"):
            load_config(tmp_path / "mine.toml")


def test_a_list_can_hold_components_with_options(tmp_path: Path) -> None:
    listed = ['"uniform"', '{name = "oort-loss", explore = 0.5}', '{name = "oort-loss", explore = 0.25}']
    expected = {
        "sampler=uniform": {},
        "sampler=oort-loss,explore=0.5": {"clients.sampler.explore": 0.5},
        "sampler=oort-loss,explore=0.25": {"clients.sampler.explore": 0.25},
    }
    for key in ("clients.sampler", '"clients.sampler"'):
        runs = named(planned(f"[sweep]\n{key} = [{', '.join(listed)}]", tmp_path))
        assert list(runs) == [*expected]
        for name, run in runs.items():
            assert run.config.clients.sampler.given == {k[16:]: value for k, value in expected[name].items()}
            assert run.labels == {"clients.sampler": run.config.clients.sampler.name, **expected[name]}
    one = planned(f'[sweep]\n"clients.sampler" = [{listed[1]}]', tmp_path, ("clients.sampler.explore=0.1",))
    assert (one.runs[0].name, one.runs[0].config.clients.sampler.given) == ("sampler=oort-loss", {"explore": 0.1})
    models = planned('model.hidden = [3]\n[sweep]\nmodel = ["mlp", "text-cnn"]', tmp_path)
    assert [run.config.model.options for run in models.runs] == [{"hidden": [3]}, {}], "another one drops the options"
    metrics = planned('[sweep]\ntask.metrics = [["perplexity"], ["perplexity", {name = "top-k", k = 3}]]', tmp_path)
    assert [run.name for run in metrics.runs] == ["metrics=perplexity", "metrics=perplexity-top-k-k-3"]


X, Y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"name": nn.Sequential(nn.Linear(64, 10))}},
        {"data": {"source": ClientArrays(X, Y, Y, test=(X, Y))}, "clients": {"count": 1}},
    ],
)
def test_objects_that_no_file_contains_are_rejected(tables: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run seed=0: runs of a sweep start from files, but"):
        plan_sweep({**COUNT, **tables, "sweep": {"seed": [0]}}, tmp_path)


# Files laid over others

WHOLE = """
rounds = 100
[model]
hidden = [200, 200]
[prepare]
dataset = "digits"
clients = 20
[prepare.even]
partition = "iid"
[prepare.skewed]
partition = "dirichlet"
alpha = 0.1
[clients]
count = 5
[sweep]
seed = [0, 1, 2]
data.source = ["even", "skewed"]
[[sweep.run]]
name = "A"
preset = "fedavg"
local.lr = [0.1, 0.2]
[[sweep.run]]
name = "P"
preset = "fedprox"
clients.sampler = {name = "oort-loss", explore = 0.5}
"""
SMALL = """
base = "whole.toml"
rounds = 10
[model]
hidden = [8]
[prepare.skewed]
alpha = 0.5
[sweep]
seed = [7]
data.source = ["skewed"]
[[sweep.run]]
name = "P"
local.proximal_mu = 0.3
clients.sampler = "power-of-choice"
[[sweep.run]]
name = "Y"
preset = "fedyogi"
"""


def layered(folder: Path, text: str, name: str = "small.toml") -> Sweep:
    (folder / "whole.toml").write_text(WHOLE)
    (folder / name).write_text(text)
    return plan_sweep(folder / name, folder / "out")


def test_a_file_changes_its_base_key_by_key_and_variant_by_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = layered(tmp_path, SMALL)
    runs = named(sweep)
    assert set(runs) == {"A,skewed,lr=0.1,seed=7", "A,skewed,lr=0.2,seed=7", "P,skewed,seed=7", "Y,skewed,seed=7"}
    prox = runs["P,skewed,seed=7"]
    assert (prox.config.rounds, prox.config.preset, prox.config.local.proximal_mu) == (10, "fedprox", 0.3)
    assert prox.config.model.options == {"hidden": [8]} and prox.config.clients.count == 5
    assert (prox.config.clients.sampler.name, prox.config.clients.sampler.given) == ("power-of-choice", {})
    assert prox.data is not None, "shards of the base that no run uses any more are left out"
    assert prox.data.words == ("digits", "--clients", "20", "--partition", "dirichlet", "--alpha", "0.5")
    assert sweep.origin == str(tmp_path / "small.toml") and len(plan_sweep(tmp_path / "whole.toml").runs) == 18
    third = layered(tmp_path, 'base = "small.toml"\nrounds = 3\n[sweep]\nseed = [1]', "third.toml")
    assert len(third.runs) == 4 and {(run.config.rounds, run.config.seed) for run in third.runs} == {(3, 1)}
    one_seed = layered(tmp_path, 'base = "whole.toml"\nseed = 9')
    assert len(one_seed.runs) == 6 and {run.config.seed for run in one_seed.runs} == {9}, "its list is replaced"
    monkeypatch.chdir(tmp_path)
    tables = plan_sweep({"base": "whole.toml", "rounds": 2, "sweep": {"seed": [4]}}, tmp_path / "out")
    assert len(tables.runs) == 6 and {(run.config.rounds, run.config.seed) for run in tables.runs} == {(2, 4)}


def test_a_variant_of_the_base_may_be_dropped(tmp_path: Path) -> None:
    sweep = layered(tmp_path, 'base = "whole.toml"\n[[sweep.run]]\nname = "A"\ndrop = true')
    assert len(sweep.runs) == 6 and {run.labels["run"] for run in sweep.runs} == {"P"}
    replaced = layered(
        tmp_path, 'base = "whole.toml"\n[sweep]\nclients.sampler = [{name = "oort-loss", explore = 0.1}]'
    )
    assert {run.labels["clients.sampler.explore"] for run in replaced.runs if run.labels["run"] == "A"} == {0.1}
