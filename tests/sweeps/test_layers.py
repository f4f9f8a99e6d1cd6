"""Sweeps' files that lie over others: `base`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.sweeps.plan import Sweep, laid_over, plan_sweep

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
[[sweep.run]]
name = "Y"
preset = "fedyogi"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "whole.toml").write_text(WHOLE)
    return tmp_path


def planned(folder: Path, text: str, name: str = "small.toml") -> Sweep:
    (folder / name).write_text(text)
    return plan_sweep(folder / name, folder / "out")


def test_a_small_variant_says_what_is_smaller_and_nothing_else(folder: Path) -> None:
    sweep = planned(folder, SMALL)
    runs = {run.name: run for run in sweep.runs}
    assert set(runs) == {"A,skewed,lr=0.1,seed=7", "A,skewed,lr=0.2,seed=7", "P,skewed,seed=7", "Y,skewed,seed=7"}
    prox = runs["P,skewed,seed=7"]
    assert (prox.config.rounds, prox.config.preset, prox.config.local.proximal_mu) == (10, "fedprox", 0.3)
    assert prox.config.model.options == {"hidden": [8]} and prox.config.clients.count == 5
    assert prox.data is not None, "a set of the base that no run uses any more is left out"
    assert prox.data.words == ("digits", "--clients", "20", "--partition", "dirichlet", "--alpha", "0.5")
    assert sweep.origin == str(folder / "small.toml") and len(plan_sweep(folder / "whole.toml").runs) == 18


def test_files_override_files_that_override_others(folder: Path) -> None:
    planned(folder, SMALL)
    (folder / "below").mkdir()
    sweep = planned(folder / "below", 'base = "../small.toml"\nrounds = 3\n[sweep]\nseed = [1]')
    assert len(sweep.runs) == 4 and {(run.config.rounds, run.config.seed) for run in sweep.runs} == {(3, 1)}


def test_a_variant_of_the_base_may_be_dropped(folder: Path) -> None:
    sweep = planned(folder, 'base = "whole.toml"\n[[sweep.run]]\nname = "A"\ndrop = true')
    assert len(sweep.runs) == 6 and {run.labels["run"] for run in sweep.runs} == {"P"}
    others = [f'[[sweep.run]]\nname = "{name}"\ndrop = true\n' for name in "AP"]
    for own in ('[[sweep.run]]\nname = "Y"\npreset = "fedyogi"\n', '[[sweep.run]]\nname = "F"\npreset = "fedavg"\n'):
        for text in (own + "".join(others), "".join(others) + own):
            assert len(planned(folder, f'base = "whole.toml"\n{text}').runs) == 6


def test_a_list_of_which_not_all_have_names_is_replaced_as_a_whole() -> None:
    named, mixed = [{"name": "A", "x": 1}], [{"name": "A", "x": 2}, {"x": 3}]
    for below, above in ((named, mixed), (mixed, named), (mixed, [])):
        assert laid_over({"run": below}, {"run": above}) == {"run": above}


def test_a_list_of_components_is_replaced_as_a_whole(folder: Path) -> None:
    (folder / "below.toml").write_text(
        'base = "whole.toml"\n[sweep]\n"clients.sampler" = [{name = "oort", explore = 0.5}, {name = "oort"}]\n'
    )
    sweep = planned(folder, 'base = "below.toml"\n[sweep]\nclients.sampler = [{name = "oort", explore = 0.1}]')
    assert {run.labels["clients.sampler.explore"] for run in sweep.runs} == {0.1}


def test_another_component_of_a_variant_drops_the_options_of_the_one_below(folder: Path) -> None:
    (folder / "below.toml").write_text(
        'base = "whole.toml"\n[[sweep.run]]\nname = "P"\nclients.sampler = {name = "oort", explore = 0.5}\n'
    )
    sweep = planned(folder, 'base = "below.toml"\n[[sweep.run]]\nname = "P"\nclients.sampler = "power-of-choice"')
    [sampler] = {run.config.clients.sampler for run in sweep.runs if run.labels["run"] == "P"}
    assert (sampler.name, sampler.given) == ("power-of-choice", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base = 3", "base = 3: give the name of a sweep's file as a text"),
        ('base = "small.toml"', "small.toml is its own base"),
        ('base = "whole.toml"\n[swep]\nseed = [1]', "unknown key swep in {}; did you mean sweep?"),
        ('base = "none.toml"', "{} has base = 'none.toml': cannot read the configuration"),
        (
            'base = "whole.toml"\nseed = 7',
            "{}: seed = 7 would change no run, for [sweep] of the file below has a list of it",
        ),
        (
            'base = "whole.toml"\n[data]\nsource = "even"',
            "{}: data.source = 'even' would change no run, for [sweep] of the file below has a list of it",
        ),
        (
            'base = "whole.toml"\n[prepare.more]\npartition = "iid"',
            '{}: [prepare.more] is used by no run: write data.source = "more" where it is',
        ),
        (
            'base = "whole.toml"\n[[sweep.run]]\nname = "B"\ndrop = true',
            "[[sweep.run]] 'B' cannot be dropped: the file below has ['A', 'P']",
        ),
        *(
            (
                f'base = "whole.toml"\n[[sweep.run]]\nname = "A"\n{more}',
                "'A': drop = true allows no other key except name",
            )
            for more in ("drop = false", "drop = 1", 'drop = true\npreset = "fedyogi"')
        ),
        (
            'base = "whole.toml"\n[[sweep.run]]\nname = "A"\ndrop = true\n[[sweep.run]]\nname = "P"\ndrop = true',
            "[[sweep.run]]: all of them are dropped",
        ),
        ('base = "whole.toml"\n[[sweep.new]]\nname = "A"\ndrop = true', "drop"),
    ],
)
def test_what_is_wrong_with_layers_is_said(text: str, said: str, folder: Path) -> None:
    with pytest.raises(UserError) as raised:
        planned(folder, text)
    assert said.format(folder / "small.toml") in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("twice", ["whole.toml", "small.toml"])
def test_a_name_that_two_variants_have_does_not_say_which_is_meant(folder: Path, twice: str) -> None:
    texts = {"whole.toml": WHOLE, "small.toml": SMALL}
    texts[twice] += "[[sweep.run]]\nname = 'P'\npreset = 'fedprox'\nlocal.proximal_mu = [0.7]\n"
    (folder / "whole.toml").write_text(texts["whole.toml"])
    with pytest.raises(UserError, match=r"two \[\[sweep.run\]\] have the name 'P'"):
        planned(folder, texts["small.toml"])
    assert len(plan_sweep(folder / "whole.toml").runs) >= 18, "a file by itself may"


def test_a_base_that_leads_back_is_rejected(folder: Path) -> None:
    (folder / "other.toml").write_text('base = "small.toml"')
    with pytest.raises(UserError, match=r"small.toml is its own base, through 2 files"):
        planned(folder, 'base = "other.toml"')


def test_the_same_tables_from_python_override_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    sweep = plan_sweep({"base": "whole.toml", "rounds": 2, "sweep": {"seed": [4]}}, folder / "out")
    assert len(sweep.runs) == 6 and {(run.config.rounds, run.config.seed) for run in sweep.runs} == {(2, 4)}


def test_fedmpi_train_says_what_to_do_with_a_layer(folder: Path) -> None:
    (folder / "small.toml").write_text('base = "whole.toml"')
    with pytest.raises(UserError, match="describes a sweep of many runs"):
        load_config(folder / "small.toml")
