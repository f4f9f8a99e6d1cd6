"""A sweep's file: its runs, their names and numbers, their shards, and errors in it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpi import ClientArrays, UserError
from fedmpi.config import load_config
from fedmpi.sweeps.plan import PlannedRun, Sweep, labels_text, plan_sweep

REPOSITORY = Path(__file__).parents[2]
COUNT = {"clients": {"count": 5}}


def planned(text: str, folder: Path, settings: tuple[str, ...] = (), ranks: int | None = None) -> Sweep:
    path = folder / "mine.toml"
    path.write_text("clients.count = 5\n" + text)
    return plan_sweep(path, folder / "out", settings, ranks)


def named(sweep: Sweep) -> dict[str, PlannedRun]:
    return {run.name: run for run in sweep.runs}


def test_lists_are_crossed_and_seeds_go_round_outermost(tmp_path: Path) -> None:
    sweep = planned(
        'rounds = 7\n[sweep]\npreset = ["fedavg", "fedadam"]\nseed = [3, 1]\nlocal.lr = [0.1, 0.5]', tmp_path
    )
    expected = [(seed, preset, lr) for seed, preset, lr in product((3, 1), ("fedavg", "fedadam"), (0.1, 0.5))]
    assert [(run.config.seed, run.config.preset, run.config.local.lr) for run in sweep.runs] == expected
    assert [run.index for run in sweep.runs] == list(range(8))
    assert {run.config.rounds for run in sweep.runs} == {7}
    assert sweep.runs[0].name == "fedavg,lr=0.1,seed=3"
    assert sweep.runs[0].folder == tmp_path / "out" / "fedavg,lr=0.1,seed=3"
    assert sweep.runs[5].labels == {"preset": "fedavg", "seed": 1, "local.lr": 0.5}
    given = ["preset=fedadam", "rounds=7", "seed=1", "local.lr=0.5", "clients.count=5"]
    assert sweep.runs[7].config == load_config(None, given), "as fedmpi train would have it"


def test_more_values_leave_names_as_they_are_and_more_seeds_numbers_too(tmp_path: Path) -> None:
    few = planned('[sweep]\npreset = ["fedavg"]\nseed = [0, 1]', tmp_path)
    assert [run.name for run in few.runs] == ["fedavg,seed=0", "fedavg,seed=1"], "a list of one value is named, too"
    assert set(named(few)) <= set(named(planned('[sweep]\npreset = ["fedavg", "fedprox"]\nseed = [0, 1]', tmp_path)))
    more = planned('[sweep]\npreset = ["fedavg"]\nseed = [0, 1, 5]', tmp_path)
    assert [run.name for run in more.runs[:2]] == [run.name for run in few.runs]


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
    sweep = plan_sweep(
        {
            "clients.count": 5,
            "sweep": {
                "run": [{"name": "A", "preset": "fedavg"}, {"name": "P", "preset": "fedprox"}],
                "size": [{"name": "small", "model.hidden": [[8]]}, {"name": "large", "model": {"hidden": [[64, 64]]}}],
            },
        },
        tmp_path,
    )
    assert [run.name for run in sweep.runs] == [
        f"{one},{two},hidden={size}" for one in "AP" for two, size in (("small", "8"), ("large", "64-64"))
    ]
    assert sweep.runs[3].config.model.options == {"hidden": [64, 64]}, "a list of lists holds values that are lists"


def test_settings_of_the_command_line_take_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    sweep = planned(VARIANTS, tmp_path, ("seed=4", "local.lr=0.3"), ranks=3)
    assert {(run.config.seed, run.config.local.lr) for run in sweep.runs} == {(4, 0.3)} and sweep.ranks == 3
    prox = [f"Prox,epochs={epochs},proximal_mu={mu}" for epochs in (1, 2) for mu in (0.1, 1.0)]
    assert set(named(sweep)) == {"plain-one,epochs=1", "plain-one,epochs=2", "by-steps", *prox}
    lists = "[sweep]\nranks = 2\nlocal.epochs = [1, 2]\nseed = [0, 1]"
    assert set(named(planned(lists, tmp_path, ("local.steps=5",)))) == {"seed=0", "seed=1"}
    assert planned(lists, tmp_path).ranks == 2
    crossed = '[[sweep.run]]\nname = "a"\nlocal.epochs = [1, 2]'
    assert set(named(planned(crossed, tmp_path, ("local.steps=5",)))) == {"a"}, "of a variant, too"


def test_names_are_fit_for_folders(tmp_path: Path) -> None:
    sweep = plan_sweep(
        {**COUNT, "sweep": {"run": [{"name": "FedAvg, E = 2/α: *?"}, {"name": "α" * 200, "rounds": 3}]}}, tmp_path
    )
    short, long = (run.name for run in sweep.runs)
    assert short == "FedAvg-E-2-α" and len(long.encode()) <= 200 and long.startswith("α" * 70)
    many = plan_sweep({**COUNT, "sweep": {"run": [{"name": "漢" * 140}]}}, tmp_path).runs[0].name
    assert many.startswith("漢" * 50) and len(many.encode()) <= 200, "bytes count, not signs"
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


def test_options_of_a_partition_can_be_lists(tmp_path: Path) -> None:
    text = (
        '[prepare]\ndataset = "digits"\npartition = "dirichlet"\n[sweep]\nprepare.alpha = [0.1, 10.0]\nseed = [0, 1]\n'
    )
    runs = named(planned(text, tmp_path))
    assert set(runs) == {f"alpha={alpha},seed={seed}" for alpha in (0.1, 10.0) for seed in (0, 1)}
    folders = {run.data.folder.name for run in runs.values() if run.data}
    assert folders == {"digits,alpha=0.1", "digits,alpha=10.0"}


WRONG: list[tuple[str, str]] = [
    ("[swep]\nseed = [1]", "unknown key swep in {}; did you mean sweep?"),
    ("[sweep]\nsed = [1]", "did you mean seed?"),
    ("[sweep]\nrank = 2", "unknown key rank in [sweep] of {}; did you mean ranks?"),
    ("[sweep]\nlocal.lrr = [0.1]", "did you mean local.lr?"),
    ("[sweep]\nlocal.lr = 0.1", "is one value: write a list of values"),
    ("[sweep]\nseed = []", "leaves no run"),
    ("[sweep]\nseed = [1, 1]", "holds 1 twice"),
    (
        '[sweep]\n"clients.sampler" = [{name = "oort", explore = 0.5}]\n"clients.sampler.explore" = [0.1]',
        "two lists in [sweep] set clients.sampler.explore",
    ),
    ("[sweep]\nranks = 0", "ranks = 0: give a number from 1"),
    ("sweep = 3", "sweep is a table of keys: write [sweep]"),
    ("[[sweep.run]]\npreset = 'fedavg'", "[[sweep.run]] needs a name"),
    ("[[sweep.local]]\nname = 'a'", "[[sweep.local]]: local is a table of keys"),
    ("[sweep]\nlocal.lr = [0.1, -1.0]", "run lr=-1.0"),
    ("[sweep]\npreset = ['fedavg', 'fedagv']", "did you mean fedavg?"),
    ("[[sweep.run]]\nname = 'a'\n[[sweep.run]]\nname = 'b'", "the runs a and b are the same"),
    ("[[sweep.run]]\nname = 'a b'\n[[sweep.run]]\nname = 'a-b'\nrounds = 3", "two runs would have the same folder"),
    ("[[sweep.run]]\nname = 'shards'", "cannot have the name shards"),
    (
        "[[sweep.run]]\nname = 'a'\nrounds = 3\n[[sweep.x]]\nname = 'b'\nrounds = 4",
        "rounds is set by each of a and b",
    ),
    ("data = 3\n[sweep]\ndata.source = ['digits']", "data is a table of keys"),
    ("[sweep]\ndata = [3]", "data is a table of keys"),
    ("local = 2\n'local.lr' = 3", "local is a table of keys, not a single value"),
    ("[sweep]\nprepare.alpha = [1.0]", "prepare.alpha has no effect: no [prepare] is used"),
    ("[prepare]\ndataset = 'digits'", '[prepare] needs partition = "NAME"'),
    ("[prepare.a]\ndataset = 'digits'\npartition = 'iid'", '[prepare.a] is used by no run: write data.source = "a"'),
    ("[prepare]\ndataset = 'digits'\npartition = 'iid'\n[sweep]\ndata.source = ['digits']", "is used by no run"),
    ("[prepare.digits]\npartition = 'iid'", "has the name of the embedded data"),
    ("[prepare]\ndataset = 'digits'\npartition = 'iid'\nout = 3", "give the folder of the shards as a text"),
    ("[prepare]\ndataset = 'digits'\npartition = 'iid'\nclients = 1979-05-27", "give a text, a number, true or false"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_is_said_in_a_sentence_with_the_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        planned(text, tmp_path)
    assert said.format(tmp_path / "mine.toml") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_different_shards_in_one_folder_are_rejected(tmp_path: Path) -> None:
    tables: Mapping[str, Any] = {
        **COUNT,
        "prepare": {"dataset": "digits", "partition": "iid", "out": "here", "seed": "{seed}"},
        "sweep": {"seed": [0, 1]},
    }
    with pytest.raises(UserError, match="different shards would share the folder .*/here"):
        plan_sweep(tables, tmp_path)


def test_fedmpi_train_says_what_to_do_with_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[sweep]\nseed = [0, 1]")
    with pytest.raises(UserError, match=r"describes a sweep of many runs: start it with fedmpi sweep .*mine.toml"):
        load_config(tmp_path / "mine.toml")


def test_the_example_of_the_documentation_describes_its_runs() -> None:
    sweep = plan_sweep(REPOSITORY / "docs" / "examples" / "sweep.toml")
    assert sweep.out == Path("runs/sweep") and len(sweep.runs) == 18
    assert named(sweep)["SCAFFOLD,lr=0.2,seed=2"].config.preset == "scaffold"


def test_more_runs_than_any_are_rejected_before_they_are_listed() -> None:
    many = list(range(1, 1001))
    crossed = {"seed": many, "local.lr": many, "local.epochs": many, "local.batch_size": many}
    with pytest.raises(UserError, match="describes more than 100,000 runs"):
        plan_sweep({"clients": {"count": 3}, "sweep": crossed})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('name = ["mlp", "mpl"]', "mpl"),
        ('model = ["mlp", {name = "text-cnn", hidden = [3]}]', "model.hidden has no effect here: it needs model = "),
        ('model = ["mlp"]\n"model.hidden" = ["wide"]', "model.hidden = 'wide' does not suit mlp"),
        ('model = ["nowhere.at_all:network"]', "nowhere"),
    ],
)
def test_a_model_that_cannot_be_is_rejected_before_any_run_starts(table: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mine.toml, run ") as refused:
        planned(f"[sweep]\n{table}\n", tmp_path)
    assert said in str(refused.value)


def test_another_component_drops_the_options_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    sweep = planned('model.hidden = [3]\n[sweep]\nmodel = ["mlp", "text-cnn"]', tmp_path)
    assert [run.config.model.options for run in sweep.runs] == [{"hidden": [3]}, {}]


def test_a_list_can_hold_components_with_options(tmp_path: Path) -> None:
    listed = ['"uniform"', '{name = "oort", explore = 0.5}', '{name = "oort", explore = 0.25}']
    expected = {
        "sampler=uniform": {},
        "sampler=oort,explore=0.5": {"clients.sampler.explore": 0.5},
        "sampler=oort,explore=0.25": {"clients.sampler.explore": 0.25},
    }
    for lists in (listed, listed[1:]):
        for key in ("clients.sampler", '"clients.sampler"'):
            runs = named(planned(f"[sweep]\n{key} = [{', '.join(lists)}]", tmp_path))
            assert list(runs) == [*expected][-len(lists) :]
            for name, run in runs.items():
                options = {key.rpartition(".")[2]: value for key, value in expected[name].items()}
                assert run.config.clients.sampler.given == options
                assert run.labels == {"clients.sampler": run.config.clients.sampler.name, **expected[name]}
    one = planned(
        '[sweep]\n"clients.sampler" = [{name = "oort", explore = 0.5}]', tmp_path, ("clients.sampler.explore=0.1",)
    )
    assert (one.runs[0].name, one.runs[0].config.clients.sampler.given) == ("sampler=oort", {"explore": 0.1})


def test_variants_can_list_components_and_a_key_at_the_top_can_too(tmp_path: Path) -> None:
    text = """
    [sweep]
    attack = ["none", {name = "noise", scale = 0.5}]
    rebalance = [false, {alpha = 0.5}]
    [[sweep.run]]
    name = "a"
    clients.sampler = ["uniform", {name = "oort", explore = 0.5}]
    """
    runs = named(planned(text, tmp_path))
    assert set(runs) == {
        f"a,{attack},{rebalance},{sampler}"
        for attack in ("attack=none", "attack=noise,scale=0.5")
        for rebalance in ("rebalance=false", "alpha=0.5")
        for sampler in ("sampler=uniform", "sampler=oort,explore=0.5")
    }
    config = runs["a,attack=noise,scale=0.5,alpha=0.5,sampler=uniform"].config
    assert (config.attack.name, config.attack.scale, config.rebalance.alpha) == ("noise", 0.5, 0.5)


def test_components_in_a_list_of_a_key_are_named_with_their_options(tmp_path: Path) -> None:
    sweep = planned('[sweep]\ntask.metrics = [["top-5"], ["top-5", {name = "top-k", k = 3}]]', tmp_path)
    assert [run.name for run in sweep.runs] == ["metrics=top-5", "metrics=top-5-top-k-k-3"]
    assert labels_text(sweep.runs[1].labels) == "task.metrics = [top-5, top-k(k = 3)]"


def test_a_run_that_a_key_of_all_runs_does_not_suit_is_named(tmp_path: Path) -> None:
    variants = "".join(f'[[sweep.run]]\nname = "{p}"\npreset = "{p}"\n' for p in ("fedavg", "fedsampling"))
    with pytest.raises(UserError, match=r"^run fedsampling,seed=3: clients.count \(from .*mine.toml\) has no effect"):
        planned(f"[sweep]\nseed = [3]\n{variants}", tmp_path)


def test_a_run_is_named_once_and_with_its_file_whatever_the_words_of_the_error(tmp_path: Path) -> None:
    for text, settings, said in (
        ("[sweep]\nlocal.lr = [0.1, -1]", (), r"local.lr.* \(from [^ ]*mine.toml, run lr=-1\)"),
        ("[sweep]\nlocal.lr = [0.1]", ("local.momentu=7",), r"[^ ]*mine.toml, run lr=0.1: unknown key local.momentu"),
    ):
        with pytest.raises(UserError, match=f"^{said}") as refused:
            planned(text, tmp_path, settings)
        assert str(refused.value).count("run lr=") == 1
    (tmp_path / "run a").mkdir()
    with pytest.raises(UserError, match=r"^run a: clients.count \(from .*mine.toml\) has no effect"):
        planned('[[sweep.run]]\nname = "a"\npreset = "fedsampling"\n', tmp_path / "run a")


def test_a_model_is_looked_at_once_whatever_the_number_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedmpi.models as models

    seen: list[object] = []
    check = models.check_model_options
    monkeypatch.setattr(models, "check_model_options", lambda name, options: seen.append(name) or check(name, options))
    planned('[sweep]\nmodel = ["mlp", "cnn"]\nseed = [0, 1, 2]', tmp_path)
    assert seen == ["mlp", "cnn"]


def test_of_several_runs_with_one_wrong_model_the_first_is_named(tmp_path: Path) -> None:
    variants = [{"name": name, "model": {"name": "mlp", option: 3}} for name, option in zip("abc", "xyx", strict=True)]
    with pytest.raises(UserError, match="run a: model.x is unknown to mlp"):
        plan_sweep({"clients": {"count": 5}, "sweep": {"run": variants}}, tmp_path)


def test_objects_that_no_file_contains_are_rejected_before_any_run_starts(tmp_path: Path) -> None:
    from torch import nn

    tables = {
        "clients": {"count": 5},
        "model": {"name": nn.Sequential(nn.Linear(64, 10))},
        "sweep": {"seed": [0]},
    }
    with pytest.raises(UserError, match="run seed=0: runs of a sweep are started from files, and model was given as"):
        plan_sweep(tables, tmp_path)


def test_arrays_in_memory_are_rejected_before_any_run_starts(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    tables = {
        "clients": {"count": 1},
        "data": {"source": ClientArrays(x, y, y, test=(x, y))},
        "sweep": {"seed": [0]},
    }
    with pytest.raises(UserError, match="started from files, and data.source are arrays in memory: name a function"):
        plan_sweep(tables, tmp_path)


def test_options_are_looked_at_with_every_model_that_has_others(tmp_path: Path) -> None:
    variants = [{"name": "a", "model": {"hidden": [[3]]}}, {"name": "b", "model": {"hiden": [[3]]}}]
    with pytest.raises(UserError, match="run b.*hiden.*did you mean hidden"):
        plan_sweep({"clients": {"count": 5}, "model": {"name": "mlp"}, "sweep": {"run": variants}}, tmp_path)


def test_small_matrices_are_no_option_of_the_model(tmp_path: Path) -> None:
    model = {"name": "mlp", "lora": {"rank": 2}}
    tables = {"clients": {"count": 5}, "model": model, "sweep": {"seed": [0]}}
    assert plan_sweep(tables, tmp_path).runs[0].config.model.options.get("lora") is not None
