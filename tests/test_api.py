"""fedmpi from Python: one process. What several ranks do is in tests/mpi/test_api_ranks.py."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import cli
from fedmpi.common.arithmetic import WORKSPACE
from fedmpi.config import load_config
from fedmpi.config.loading import given_config
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.records.history import BestRound
from tests.end_to_end.runs import TIMINGS
from tests.mpi.launch import REPOSITORY

SMALL = {"rounds": 3, "clients.count": 5, "cluster.threads": 1, "local.engine": "sequential", "model.hidden": [8]}
Record = dict[str, Any]


def small(preset: str = "fedavg", **keywords: Any) -> fedmpi.Run:
    return fedmpi.run(preset, SMALL | keywords.pop("more", {}), **keywords)


def untimed(records: list[Record]) -> list[Record]:
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in records]


def same_values(one: nn.Module, other: nn.Module) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.fixture(scope="module")
def plain() -> fedmpi.Run:
    """Three small rounds without a folder."""
    return small()


def share_right(model: nn.Module) -> float:
    """Return the share of the digits' test set that a model classifies correctly."""
    x, y = open_store("digits").test()
    description = open_store("digits").description
    features = (torch.from_numpy(x / 255.0) - description.mean[0]) / description.std[0]
    with torch.no_grad():
        return float((model(features.float()).argmax(1) == torch.from_numpy(y)).double().mean())


def digits() -> fedmpi.ClientArrays:
    """Return the embedded digits as a user's arrays."""
    store = open_store("digits")
    owner = np.repeat(np.arange(store.clients), store.sizes)
    x, y = store.rows(np.arange(store.samples))
    description = store.description
    return fedmpi.ClientArrays(x, y, owner, test=store.test(), mean=description.mean, std=description.std)


# Result of a run


def test_a_run_has_a_record_a_round_with_its_evaluation_a_summary_and_the_final_model(plain: fedmpi.Run):
    assert [record["round"] for record in plain.records] == [0, 1, 2]
    assert all("test_accuracy" in record and "train_loss" in record for record in plain.records)
    assert plain.summary["final"]["test_accuracy"] == plain.records[-1]["test_accuracy"]
    assert plain.folder is None and plain.ending == "finished" and plain.config.preset == "fedavg"
    assert plain.frame()["round"].tolist() == [0, 1, 2]
    assert repr(plain) == f"<Run of 3 rounds, finished: test_accuracy {plain.records[-1]['test_accuracy']:.4f}>"
    assert share_right(plain.model) == plain.records[-1]["test_accuracy"]


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    small()
    assert not [*tmp_path.iterdir()]


def test_records_and_model_are_those_of_the_command_line(
    plain: fedmpi.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gc, "freeze", lambda: None)  # the command does so, since its process ends soon
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert (
        cli.app(["train", "--set", "preset=fedavg", *settings, "--out", str(tmp_path / "cli")], standalone_mode=False)
        == 0
    )
    there, here = fedmpi.load_run(tmp_path / "cli"), small(out=tmp_path / "here")
    assert untimed(there.records) == untimed(here.records) == untimed(plain.records)
    assert same_values(there.model, plain.model) and same_values(here.model, plain.model)
    kept = [json.loads(line) for line in (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()]
    assert here.records == kept and here.summary == json.loads((tmp_path / "here" / "summary.json").read_text())


# Arguments of a run


def test_a_preset_a_file_keys_and_a_configuration_say_the_same(tmp_path: Path):
    (tmp_path / "run.toml").write_text('preset = "fedavg"\nrounds = 2\n[model]\nhidden = [8]\n[clients]\ncount = 5\n')
    nested = {"preset": "fedavg", "rounds": 2, "model": {"hidden": [8]}, "clients": {"count": 5}}
    wanted = load_config(tmp_path / "run.toml")
    for config in ("fedavg", tmp_path / "run.toml", str(tmp_path / "run.toml"), nested, fedmpi.Config(**nested)):
        keys = {"rounds": 2, "model.hidden": [8], "clients.count": 5}
        assert given_config(config, keys if config == "fedavg" else {}) == wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fedavgg",), "did you mean fedavg"),
        ((None,), "not NoneType"),
        (("fedavg", "rounds=3"), "not str"),
        (("fedavg", {"local.lr": 1, "local": {"lr": 2}}), "local.lr is given twice"),
        (
            (fedmpi.Config(clients={"count": 5}), {"clients.sampler": "all"}),
            "clients.count (from Config) has no effect",
        ),
        (("fedavg", {"data.source": "nowhere"}), "the shard folder nowhere does not exist"),
        (("fedavg", {"model.name": "mlpp"}), "did you mean mlp"),
        ({"model": 7}, "model = 7"),
        ({"data": (1, 2)}, "fedmpi.ClientArrays(x, y, owner"),
        ({"resume": True}, "resume needs out"),
        ({"data": "digits", "overrides": {"data.source": "digits"}}, "Keep one of them"),
    ],
)
def test_wrong_configurations_and_arguments_are_user_errors(arguments: Any, words: str):
    keywords = arguments if isinstance(arguments, dict) else {}
    with pytest.raises(fedmpi.UserError, match=re.escape(words)):
        fedmpi.run(*(["fedavg"] if keywords else arguments), **keywords)


# A custom model


def test_a_function_and_a_network_are_models(plain: fedmpi.Run):
    def small_net(description: Any, *, width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Dropout(0.5), nn.Linear(width, description.classes))

    by_function = fedmpi.run("fedavg", {"rounds": 1, "model.width": 6}, model=small_net)
    assert by_function.model[1].out_features == 6
    assert type(by_function.model[2]) is nn.Dropout and by_function.model.train()(torch.ones(2, 1, 8, 8)).shape == (
        2,
        10,
    )
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    one, other = (fedmpi.run("fedavg", {"rounds": 1, "local.engine": "sequential"}, model=network) for _ in range(2))
    assert same_values(one.model, other.model) and one.model is not network
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items()), "changed in place"
    assert not same_values(one.model, network)


def test_what_the_configuration_says_of_objects_is_their_names(tmp_path: Path):
    run = fedmpi.run("fedavg", {"rounds": 1}, model=own_net, data=digits(), out=tmp_path / "run")
    written = (tmp_path / "run" / "config.toml").read_text()
    assert f'model = "{own_net.__module__}:own_net"' in written and 'source = "ClientArrays:arrays-' in written
    assert same_values(fedmpi.load_run(tmp_path / "run").model, run.model)
    more = fedmpi.run("fedavg", {"rounds": 1}, model=own_net, data=digits(), out=tmp_path / "run", resume=True)
    assert untimed(more.records) == untimed(run.records)


def own_net(description: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, description.classes))


# The process stays as it was


def test_handlers_threads_generators_and_logging_are_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def state() -> list[Any]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        log = logging.getLogger("fedmpi")
        arithmetic = [torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()]
        arithmetic += [torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr()]
        cudnn = torch.backends.cudnn
        return [
            os.environ.get(WORKSPACE),
            [signal.getsignal(number) for number in numbers],
            torch.get_num_threads(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
            [*arithmetic, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32],
            [threading.excepthook, log.level, list(log.handlers)],
        ]

    before_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = state()
    try:
        small(out=tmp_path / "plain", more={"checkpoint.every": 1})
        small(more={"server.exact": True, "cluster.threads": 1})
        with pytest.raises(fedmpi.ComponentFailure):
            small(out=tmp_path / "failing", on_round=lambda record: 1 / 0)
        assert state() == before
    finally:
        torch.set_num_threads(before_threads)
    assert capfd.readouterr() == ("", "")


def test_a_warning_is_shown_with_progress_and_goes_to_the_log_without(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "fedmpi")  # whatever other tests have left
    saturating = {"rounds": 1, "samples.budget": 100_000, "samples.size.max_size": 5, "model.hidden": [4]}
    fedmpi.run("fedsampling", saturating)
    assert caplog.messages and capfd.readouterr() == ("", "")
    fedmpi.run("fedsampling", saturating, progress=True)
    shown = capfd.readouterr()
    assert "warning: " in shown.err and "round 1/1" in shown.out


def test_a_run_works_off_the_main_thread_and_two_wait_for_each_other(plain: fedmpi.Run):
    found: list[fedmpi.Run] = []
    threads = [threading.Thread(target=lambda: found.append(small())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [untimed(run.records) for run in found] == [untimed(plain.records)] * 2


# Hearing of every round


def test_on_round_gets_every_round_with_its_evaluation_and_changes_nothing(plain: fedmpi.Run):
    records: list[Record] = []
    run = small(on_round=records.append)
    assert records == run.records and untimed(records) == untimed(plain.records)
    assert same_values(run.model, plain.model)


def test_a_true_answer_ends_the_run_evaluated_and_summed_up(plain: fedmpi.Run, tmp_path: Path):
    def enough(record: Record) -> bool:
        record.clear()  # it is a copy
        return True

    keys = {"evaluation.every": 3, "evaluation.clients": 2}
    run = small(on_round=enough, out=tmp_path / "run", more=keys)
    assert run.ending == "ended" and len(run.records) == 1 and run.summary["final"]["round"] == 0
    assert "client_accuracy_mean" in run.records[0]
    assert run.records[0]["test_accuracy"] == plain.records[0]["test_accuracy"]
    assert fedmpi.load_run(tmp_path / "run").ending == "ended"
    more = small(out=tmp_path / "run", resume=True, more=keys)
    assert more.ending == fedmpi.load_run(tmp_path / "run").ending == "finished" and same_values(
        more.model, plain.model
    )
    assert [record["round"] for record in more.records] == [0, 1, 2]


def test_an_exception_of_on_round_names_function_line_and_round():
    def fails(record: Record) -> bool:
        return bool(record["no such key"]) if record["round"] == 1 else False

    with pytest.raises(
        fedmpi.ComponentFailure, match=r"fails.*test_api\.py:\d+\) failed in round 1: KeyError"
    ) as caught:
        small(on_round=fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_asked_to_stop_a_run_saves_and_continues_later(plain: fedmpi.Run, tmp_path: Path):
    run = small(out=tmp_path / "run", stop=iter([False, True]).__next__)
    assert run.ending == "stopped" and not (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(fedmpi.UserError, match="no finished run"):
        fedmpi.load_run(tmp_path / "run").model  # noqa: B018
    more = small(out=tmp_path / "run", resume=True)
    assert more.ending == "finished" and untimed(more.records) == untimed(plain.records)
    assert untimed(run.records) == untimed(plain.records)[:1]  # requested with a folder that contains more
    assert same_values(more.model, plain.model)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also in a shell's background job, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_notebooks_stop_button_saves_and_a_second_one_stops_at_once(plain: fedmpi.Run, tmp_path: Path):
    def pressed(times: int, record: Record) -> None:
        for _ in range(times if record["round"] == 0 else 0):
            os.kill(os.getpid(), signal.SIGINT)

    for presses, folder, rounds in ((1, tmp_path / "once", 2), (2, tmp_path / "twice", 0), (1, None, 0)):
        with pytest.raises(KeyboardInterrupt):
            small(out=folder, on_round=partial(pressed, presses))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if folder is not None:
            saved = sorted(path.name for path in (folder / "checkpoints").glob("*"))
            assert saved == [f"round-{rounds:08d}.safetensors"][:rounds], "the round after it is the first to be asked"
            more = small(out=folder, resume=True)
            assert same_values(more.model, plain.model) and untimed(more.records) == untimed(plain.records)


# Best model and early stopping

RISING_AND_FALLING = {"seed": 4, "rounds": 20, "local.lr": 0.5, "evaluation.patience": 2, "checkpoint.every": 3}


@pytest.mark.parametrize("more", [{}, {"evaluation.every": 2, "evaluation.min_delta": 0.2}])
def test_patience_ends_a_run_after_the_same_round_when_resumed_and_the_best_model_is_kept(
    more: dict[str, Any], tmp_path: Path
):
    keys = RISING_AND_FALLING | more
    forever = small(more=keys | {"evaluation.patience": 50})
    least, waited, end = -1.0, 0, -1
    while waited < 2:
        end += 1
        if (score := forever.records[end].get("test_accuracy")) is not None:
            least, waited = (score, 0) if score > least + keys.get("evaluation.min_delta", 0) else (least, waited + 1)
    assert 3 < end < 19
    whole = small(more=keys, out=tmp_path / "whole")
    assert whole.ending == fedmpi.load_run(tmp_path / "whole").ending == "ended"
    assert untimed(whole.records) == untimed(forever.records)[: end + 1]
    assert f"not improved by more than {keys.get('evaluation.min_delta', 0)}" in whole.summary["ended_because"]
    assert share_right(whole.model) == whole.records[-1]["test_accuracy"] < whole.summary["best_test_accuracy"]
    assert same_values(fedmpi.load_run(tmp_path / "whole").model, whole.model)
    scores = [record["test_accuracy"] for record in whole.records if "test_accuracy" in record]
    assert share_right(whole.best_model) == whole.summary["best_test_accuracy"] == max(scores)
    assert same_values(fedmpi.load_run(tmp_path / "whole").best_model, whole.best_model)
    best = small(more=keys | {"rounds": whole.summary["best_round"] + 1})
    assert same_values(best.model, whole.best_model) and same_values(best.best_model, whole.best_model)
    for rounds in (end, end + 1):
        answers = iter([False] * (rounds - 1) + [True])
        small(more=keys, out=tmp_path / str(rounds), stop=lambda answers=answers: next(answers))
        cut = small(more=keys, out=tmp_path / str(rounds), resume=True)
        assert untimed(cut.records) == untimed(whole.records) and cut.ending == "ended"
        files = [tmp_path / name / "model-best.safetensors" for name in (str(rounds), "whole")]
        assert files[0].read_bytes() == files[1].read_bytes() and same_values(cut.best_model, whole.best_model)
        assert (tmp_path / str(rounds) / "confusion.csv").exists()
    longer = small(more=keys | {"evaluation.patience": 50}, out=tmp_path / "whole", resume=True)
    assert longer.finished and "ended_because" not in longer.summary
    assert untimed(longer.records)[-1] == untimed(forever.records)[-1]
    assert same_values(longer.best_model, forever.best_model)


def test_the_first_of_equally_good_rounds_is_the_best():
    rounds = BestRound(given_config("fedavg", {}), [{"round": t, "test_accuracy": 0.5} for t in range(3)])
    assert rounds.record["round"] == 0 and rounds.waited == 2
    config = given_config("fedavg", {"evaluation.patience": 5, "evaluation.min_delta": 0.2})
    rounds = BestRound(config, [{"round": t, "test_accuracy": 0.5 + 0.1 * t} for t in range(2)])
    assert rounds.record["round"] == 1 and rounds.waited == 1


def test_on_round_gets_a_copy_of_the_model_and_is_rejected_if_it_takes_something_else(plain: fedmpi.Run):
    seen: list[nn.Module] = []

    def keep(record: Record, model: nn.Module) -> None:
        assert share_right(model) == record["test_accuracy"]
        seen.append(model)
        with torch.no_grad():
            seen[0][1].weight.zero_()  # does not change the run

    run = small(on_round=keep)
    assert same_values(seen[-1], run.model) and same_values(run.model, plain.model)
    with pytest.raises(fedmpi.UserError, match="on_round = .* is called with record, model, which it does not take"):
        small(on_round=lambda record, model, more: None)


# Runs read from their folders


def test_runs_are_read_from_their_folders_in_the_order_of_their_names(tmp_path: Path):
    made = {name: small(out=tmp_path / name, more={"seed": seed}) for seed, name in enumerate(("b", "a"))}
    (tmp_path / "c").mkdir()
    found = fedmpi.load_runs(tmp_path / "*")
    assert [run.folder for run in found] == [tmp_path / "a", tmp_path / "b"]
    for run in found:
        assert run.folder is not None
        one = made[run.folder.name]
        assert run.records == one.records and run.summary == one.summary and run.config == one.config
        assert same_values(run.model, one.model)
        assert DataDescription(**run.summary["data"]) == open_store("digits").description
    with pytest.raises(fedmpi.UserError, match="no folder named"):
        fedmpi.load_runs(tmp_path / "c")
    run = fedmpi.load_run(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").unlink()
    with pytest.raises(fedmpi.UserError, match="holds 0 of the 3 records"):
        run.records  # noqa: B018


@pytest.mark.parametrize(
    "name, text, what",
    [
        ("summary.json", "[1, 2]", "summary"),
        ("summary.json", "null", "summary"),
        ("summary.json", '{"final": {}}', "model"),
        ("metrics.jsonl", "5\n", "records"),
    ],
)
def test_a_damaged_folder_is_a_user_error(tmp_path: Path, name: str, text: str, what: str):
    (tmp_path / "config.toml").write_text('preset = "fedavg"\n')
    (tmp_path / name).write_text(text)
    with pytest.raises(fedmpi.UserError, match=name):
        getattr(fedmpi.load_run(tmp_path), what)


def test_importing_fedmpi_is_light_leaves_the_generator_and_its_names_are_available():
    script = "import random, sys; random.seed(1); import fedmpi; assert not {'torch', 'numpy'} & {*sys.modules}; "
    script += "fedmpi.UserError, fedmpi.ClientArrays; print(random.random())"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert float(done.stdout) == random.Random(1).random()
    for name in fedmpi.__all__:
        assert getattr(fedmpi, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedmpi.nothing
