"""Studies of many runs: edited components, folders that are moved, unfinished runs, numbers of components, two keys for
one thing."""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedmpi
from data_prep.__main__ import run as data_prep
from fedmpi import cli
from fedmpi.config import config_toml, load_config
from fedmpi.config.loading import nested
from fedmpi.records.provenance import digests, part_sources
from fedmpi.results.loading import read_runs
from fedmpi.sweeps.plan import plan_sweep
from fedmpi.sweeps.run import run_sweep

SMALL: dict[str, Any] = {
    "rounds": 1,
    "clients.count": 3,
    "model.hidden": [4],
    "local.engine": "sequential",
    "cluster.threads": 1,
    "logging.tensorboard": False,
}
OWN = {**SMALL, "data.source": "digits:clients=6", "clients.sampler": "own_study.sampler:first"}
SAMPLER = """import numpy as np
import fedmpi
from own_study import helper, limits
from own_study.limits import LEAST


@fedmpi.client_sampler
def first(view):
    from own_study.late import FACTOR

    return fedmpi.Cohort(np.arange(LEAST, LEAST + view.count) * helper.STEP * FACTOR % len(view.sizes))
"""
FILES = {
    "own_study/__init__.py": "",
    "own_study/sampler.py": SAMPLER,
    "own_study/helper.py": "STEP = 1\n",
    "own_study/limits.py": "LEAST = 0\n",
    "own_study/late.py": "FACTOR = 1\n",
    "own_net.py": "from torch import nn\n\n\ndef net(description):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n",
}


@dataclass(frozen=True)
class Said:
    """Return the output of a command, with its exit code."""

    code: int
    text: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Call a command in this process: its exit code is that of the program."""

    def call(*words: Any) -> Said:
        capsys.readouterr()
        try:
            code = cli.app([str(word) for word in words], standalone_mode=False, obj=None) or 0
        except fedmpi.UserError as error:
            return Said(2, str(error))
        printed = capsys.readouterr()
        return Said(code, " ".join((printed.out + printed.err).split()))

    return call


@contextmanager
def forgotten() -> Iterator[None]:
    """Context in which the modules of this file's users are imported again, as in another process."""
    own = [name for name in sys.modules if name.partition(".")[0] in ("own_study", "own_net")]
    kept = {name: sys.modules.pop(name) for name in own}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("own_study", "own_net")]:
            del sys.modules[name]
        del kept


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working directory of a user with custom components."""
    folder = tmp_path / "home"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with forgotten():
        yield folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


EDITS = {
    "the component": ("own_study/sampler.py", "np.arange(LEAST", "np.arange(1 + LEAST"),
    "a module that it imports": ("own_study/helper.py", "STEP = 1", "STEP = 2"),
    "a constant that it imports": ("own_study/limits.py", "LEAST = 0", "LEAST = 2"),
    "a module that it imports when it is called": ("own_study/late.py", "FACTOR = 1", "FACTOR = 5"),
    "the package around it": ("own_study/__init__.py", "", "VERSION = 2\n"),
}


def test_the_sources_of_a_component_are_those_of_all_the_users_modules_that_it_imports(home: Path) -> None:
    def sources() -> dict[str, str]:
        with forgotten():
            return digests(part_sources(fedmpi.Config(clients={"count": 3, "sampler": "own_study.sampler:first"})))

    before = sources()
    assert before.keys() == {name for name in FILES if name.startswith("own_study/")}
    for file, old, new in EDITS.values():
        edit(home / file, old, new)
        after = sources()
        assert {name for name in before if after[name] != before[name]} == {file}
        before = after


def test_a_sweep_notes_other_sources_and_comparisons_keep_its_runs_apart(
    home: Path, command: Callable[..., Said]
) -> None:
    own = {**SMALL, "clients.sampler": "own_study.sampler:first"}
    sweep = nested({**own, "sweep.seed": [0, 1]})
    fedmpi.run(nested(own), out="study/seed=0")
    edit(home / "own_study/helper.py", "STEP = 1", "STEP = 2")
    with forgotten():
        planned, said = plan_sweep(sweep, Path("study")), []
        run_sweep(planned, planned.runs, stop=lambda: True, say=said.append)
        note = "seed=0 ran with other sources; `fedmpi compare` keeps such runs apart"
        assert f"note: {note}" in said
        fedmpi.run(nested(own | {"seed": 1}), out="study/seed=1")
    kept = Path("study/seed=1/plugins/own_study")
    assert all(
        (kept / name).read_text() == (home / "own_study" / name).read_text() for name in ("late.py", "helper.py")
    )
    labels = {f"plugins = {digest}" for digest in fedmpi.frame("study")["plugins"]}
    assert len(labels) == 2 and all(label in command("compare", "study").text for label in labels)


def test_a_run_that_failed_before_its_first_checkpoint_begins_with_the_repaired_source(home: Path) -> None:
    edit(home / "own_study/sampler.py", "view.count)", "view.cuont)")
    with forgotten(), pytest.raises(fedmpi.ComponentFailure, match="cuont"):
        fedmpi.run("fedavg", OWN, out="run")
    (home / "own_study/sampler.py").write_text(re.sub(r", limits\n.*import LEAST", "\nLEAST = 0", SAMPLER))
    with forgotten():
        run = fedmpi.run("fedavg", OWN, out="run", resume=True)
        assert run.finished and not Path("run/plugins/own_study/limits.py").exists()
        assert all(Path("run/plugins", name).is_file() for name in run.summary["plugins"])
        edit(home / "own_study/late.py", "FACTOR = 1", "FACTOR = 5")
    with forgotten(), pytest.raises(fedmpi.UserError, match="late.py differs from the file that this run started with"):
        fedmpi.run("fedavg", {**OWN, "rounds": 2}, out="run", resume=True)


# A study that is moved

NET = {**SMALL, "rounds": 2, "checkpoint.every": 1, "evaluation.clients": "all"}
TIMED = ("seconds", "busy_seconds", "phase_seconds")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of shards: `digits`, and `other`, which differs in the partition."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, seed in (("digits", "0"), ("other", "9")):
        words = ["--partition", "iid", "--clients", "4", "--shards", "1", "--seed", seed]
        data_prep(["digits", *words, "--out", str(folder / name)])
    return folder


def untimed(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMED} for line in lines]


def test_a_study_that_was_moved_is_resumed_repeated_and_read(
    shards: Path, home: Path, tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shards / "digits", "study/shards/digits")
    own = {**NET, "data.source": "study/shards/digits", "model": "own_net:net"}
    own["clients.sampler"] = "own_study.sampler:first"
    del own["model.hidden"]
    whole = fedmpi.run("fedavg", own, out="study/runs/whole")
    fedmpi.run("fedavg", own, out="study/runs/begun", stop=iter([False, True]).__next__)
    Path("study").rename(tmp_path / "moved")
    shutil.rmtree(home)
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(home)])
    moved = tmp_path / "moved/runs"
    found = ["--set", f"data.source={tmp_path}/moved/shards/digits"]
    with forgotten():
        assert "is not a folder with the data that" in command("train", moved / "whole/config.toml").text
        shutil.copytree(shards / "other", "study/shards/digits")
        said = command("train", moved / "whole/config.toml", "--out", "again")
        assert said.code == 2 and "holds other data than" in said.text
        other = ["--set", f"data.source={shards}/other", "--resume", "--out", moved / "begun"]
        assert "cannot change (data.source: " in command("train", moved / "begun/config.toml", *other).text
        assert command("train", moved / "whole/config.toml", "--out", "again", *found).code == 0
        assert command("train", moved / "begun/config.toml", "--out", moved / "begun", "--resume", *found).code == 0
        assert untimed(Path("again")) == untimed(moved / "begun") == untimed(moved / "whole")
        model = fedmpi.load_run(moved / "whole").model.state_dict()
        assert all(torch.equal(value, model[name]) for name, value in whole.model.state_dict().items())
    assert len(fedmpi.load_runs(moved)) == 2
    data = {run.data for run in read_runs([moved])}
    assert len(data) == 1 and len(data.pop()) == 64, "the checksum of the shards, whatever their folder"
    for words in (["compare", moved / "whole"], ["config", moved / "whole/config.toml"]):
        assert command(*words).code == 0, words
    assert not list(tmp_path.glob("moved/**/__pycache__"))


def test_an_edited_component_does_not_change_what_a_finished_run_is(
    home: Path, command: Callable[..., Said], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is read, and repeated from its own config.toml, with the sources that it was run with."""
    keys = {key: value for key, value in OWN.items() if key != "model.hidden"}
    run = fedmpi.run("fedavg", {**keys, "model": "own_net:net"}, out="runs/a")
    assert not capsys.readouterr().out, "nothing is printed without progress"
    assert len(fedmpi.load_run("runs/a").model) == 2, "nothing is edited yet"
    edit(home / "own_net.py", "nn.Linear(64, 10))", "nn.Tanh(), nn.Linear(64, 10))")
    edit(home / "own_study/helper.py", "STEP = 1", "STEP = 3")
    assert len(fedmpi.load_run("runs/a").model) == 2, "the module that is imported is another one by now"
    with forgotten():
        model = fedmpi.load_run("runs/a").model
        assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear"]
        assert command("train", "runs/a/config.toml", "--out", "runs/b").code == 0
        import own_net

        assert "Tanh" in Path(own_net.__file__).read_text()
    assert untimed(Path("runs/b")) == [{k: v for k, v in r.items() if k not in TIMED} for r in run.records]


# Unfinished runs, and all records as one table


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, one that was stopped, and one that ended early."""
    folder = tmp_path_factory.mktemp("study")
    for name, more in (
        ("lr=0.1,seed=0", {"local.lr": 0.1}),
        ("lr=0.2,seed=10", {"local.lr": 0.2, "seed": 10}),
        ("lr=0.2,seed=2", {"local.lr": 0.2, "seed": 2, "evaluation.every": 2}),
        ("ended", {"seed": 3, "local.steps": 1}),
    ):
        stop = iter([False, True]).__next__ if "evaluation.every" in more else None
        ends = (lambda _: True) if name == "ended" else None
        keys = {**SMALL, "rounds": 3, **more}
        fedmpi.run("fedavg", keys, data="digits:clients=6", out=folder / name, stop=stop, on_round=ends)
    return folder


RUNS = [("ended", 3, True), ("lr=0.1,seed=0", 0, True), ("lr=0.2,seed=2", 2, False), ("lr=0.2,seed=10", 10, True)]


def test_unfinished_runs_are_left_out_and_named(study: Path) -> None:
    with pytest.warns(UserWarning, match=r"^left out, not finished: .*lr=0.2,seed=2 \(1 of 3 rounds\)"):
        runs = fedmpi.load_runs(study)
    assert [run.folder.name for run in runs if run.folder] == [name for name, _, finished in RUNS if finished]
    every = fedmpi.load_runs(study, unfinished=True)
    assert [(run.folder.name, run.config.seed, run.finished) for run in every if run.folder] == RUNS
    with warnings.catch_warnings(action="error"):
        assert len(fedmpi.load_runs(study / "lr=0.1*")) == 1
    with pytest.raises(fedmpi.UserError, match=r"is finished: .*seed=2 \(1 of 3 rounds\). Continue them, or set unfin"):
        fedmpi.load_runs(study / "*seed=2")


def test_a_study_is_one_tidy_table(study: Path) -> None:
    with pytest.warns(UserWarning, match=r"not finished: .*lr=0.2,seed=2 \(1 of 3 rounds\); their rows have finished"):
        table = fedmpi.frame(study)
    keys = ["run", "seed", "finished", "local.lr", "local.epochs", "evaluation.every", "local.steps", "round"]
    assert sorted(table.columns[:8]) == sorted(keys)
    assert np.isnan(table["local.epochs"][0]) and (table["local.epochs"] > 0).sum() == 7
    rounds = [1, 3, 1, 3]
    expected = [(*run, t) for run, count in zip(RUNS, rounds, strict=True) for t in range(count)]
    assert [tuple(row) for row in table[["run", "seed", "finished", "round"]].to_numpy()] == expected
    record, last = fedmpi.load_run(study / "lr=0.2,seed=10").records[2], table.iloc[-1]
    assert all(last[key] == record[key] for key in ("test_accuracy", "train_loss", "participants"))
    assert last["phase_seconds.train"] == record["phase_seconds"]["train"] and last["local.lr"] == 0.2
    with warnings.catch_warnings(action="error"):
        one = fedmpi.frame(study / "lr=0.1*")
    assert list(one.columns[:4]) == ["run", "seed", "finished", "round"], "nothing differs"


COMPONENTS = """import numpy as np
import fedmpi


class Counting(fedmpi.LocalAlgorithm):
    sums, numbers = ("moved",), ("samples", "half")

    def finish(self, client, server, work, generator):
        return {"moved": work.delta, "samples": client.samples, "half": 0.5}


@fedmpi.client_sampler
class Kept:
    def draw(self, view):
        numbers = {"threshold": np.float32(0.25 + view.round), "count": np.int64(view.count)}
        return fedmpi.Cohort([4, 2, 1], numbers=numbers)
"""


@pytest.mark.parametrize("more", [{}, {"server.exact": True, "clients.failure_rate": 0.5}], ids=["plain", "exact"])
def test_numbers_of_components_reach_records_tensorboard_compare_and_tables(
    more: dict[str, Any], home: Path, command: Callable[..., Said]
) -> None:
    Path("components.py").write_text(COMPONENTS)
    own = {"local.algorithm": "components:Counting", "clients.sampler": "components:Kept"}
    keys = {**SMALL, "rounds": 2, "logging.tensorboard": True, **own, **more}
    run = fedmpi.run("fedavg", keys, data="digits:clients=6", out="runs/a")
    events, table = EventAccumulator("runs/a"), fedmpi.frame("runs")
    events.Reload()
    for name in ("local_half", "local_samples", "sampler_threshold", "sampler_count"):
        known = [record for record in run.records if name in record]  # all clients may drop out
        expected = {
            "local_half": [0.5] * len(known),
            "local_samples": [record["samples"] / record["participants"] for record in known],
            "sampler_threshold": [0.25 + record["round"] for record in known],
            "sampler_count": [3] * len(known),
        }[name]
        assert [record[name] for record in known] == pytest.approx(expected, rel=1e-6) and known
        shown = [event.value for event in events.Scalars(name.replace("_", "/", 1))]
        assert shown == pytest.approx(expected, rel=1e-6) and table[name].dropna().tolist() == pytest.approx(expected)
        assert f"{known[-1][name]:.4g}" in command("compare", "runs", "--metric", name).text


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        pytest.param({"clients.count": 3}, ["clients.fraction=0.5"], id="file and setting"),
        pytest.param({"local.steps": 2, "local.epochs": 1}, [], id="both in the file"),
        pytest.param({}, ["data.source=digits:clients=5", "data.source.clients=6"], id="an option in a name"),
    ],
)
def test_two_keys_that_say_the_same_are_rejected(table: dict[str, Any], settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(nested({"preset": "fedavg", **table})))
    with pytest.raises(fedmpi.UserError, match=r"say the same in two ways\. Keep one of them") as refused:
        load_config(tmp_path / "run.toml", settings)
    keys = [*table, *(setting.partition("=")[0] for setting in settings)]
    assert all(key in str(refused.value) for key in keys)


def test_one_of_two_keys_takes_the_place_of_the_presets_or_of_a_default(tmp_path: Path) -> None:
    half = load_config(None, ["preset=fedavg", "clients.fraction=0.5", "local.steps=2"])
    assert half.clients.count is half.local.epochs is None
    (tmp_path / "config.toml").write_text(config_toml(load_config(None, ["preset=fedavg"])))
    assert load_config(tmp_path / "config.toml", ["local.steps=2"]).local.epochs is None, "it repeats the preset's"
    with pytest.raises(fedmpi.UserError, match=r"data= and data.source of the overrides say the same in two ways"):
        fedmpi.run("fedavg", {"data.source": "digits"}, data="digits")


def test_every_option_has_a_separate_description(command: Callable[..., Said]) -> None:
    for part in fedmpi.components():
        words = [field.description for field in part.own.values()]
        assert all(words) and len(set(words)) == len(words), (part.kind, part.name, words)
    said = command("components", "--kind", "model").text
    assert "heads (int, default: 20) Heads of the attention. head_size (int, default: 20) Values of a head." in said
