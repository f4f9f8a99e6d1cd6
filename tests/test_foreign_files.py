"""Files that were written from the documents alone, tests/foreign: as they are on 1 and 3 ranks, and after a stop.

And what is said to those who write such files for the first time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import Cohort, LocalAlgorithm, aggregator, client_sampler, server_optimizer, weights
from fedmpi.testing.kit import part_of
from tests.mpi.launch import run_mpi

FILES = Path(__file__).parent / "foreign"
SAME = {"rounds": 3, "clients.count": 4, "server.exact": True}
TOGETHER: dict[str, dict[str, Any]] = {
    "state": {
        "clients.sampler": "bandit:Bandit",
        "clients.sampler.pool": 7,
        "local.algorithm": "variates:Variates",
        "local.algorithm.memory": 0.2,
        "clients.availability": "tides:tides",
        "clients.availability.low": 0.5,
    },
    "data": {
        "data.source": "blobs:blobs",
        "data.source.clients": 7,
        "samples.sampler": "stripes:stripes",
        "samples.sampler.every": 3,
        "server.aggregator": "weiszfeld:Weiszfeld",
    },
}


@pytest.fixture(autouse=True)
def among_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILES)
    monkeypatch.syspath_prepend(str(FILES))


def facts(run: fedmpi.Run) -> list[Any]:
    """Return the result of a run: a digest of its model, losses and selected clients."""
    values = b"".join(value.numpy().tobytes() for value in run.model.state_dict().values())
    scores = [[record[key] for key in ("train_loss", "test_loss", "participants", "samples")] for record in run.records]
    return [hashlib.sha256(values).hexdigest(), scores]


def after_rounds(rounds: int) -> Callable[[], bool]:
    asked = iter(range(100))
    return lambda: next(asked) + 1 >= rounds


@pytest.mark.parametrize("name", TOGETHER)
def test_they_continue_after_a_stop_as_if_there_had_been_none(name: str, tmp_path: Path) -> None:
    settings = SAME | TOGETHER[name]
    whole = facts(fedmpi.run("fedavg", settings))
    assert fedmpi.run("fedavg", settings, out=tmp_path / "run", stop=after_rounds(2)).ending == "stopped"
    assert facts(fedmpi.run("fedavg", settings, out=tmp_path / "run", resume=True)) == whole
    assert sum(participants for _, _, participants, _ in whole[1]) > 8


@pytest.mark.parametrize("name", ["bandit:Bandit", "stripes:stripes", "variates:Variates", "weiszfeld:Weiszfeld"])
def test_they_keep_their_contract(name: str) -> None:
    for check in fedmpi.testing.checks(part_of(name), {}, runs=False):
        assert check()


def test_options_of_data_are_kept_with_the_run_and_wrong_ones_rejected(tmp_path: Path) -> None:
    data = {"data.source": "blobs:blobs", "data.source.clients": 5}
    fedmpi.run("fedavg", {"rounds": 1, "clients.sampler": "all"} | data, out=tmp_path)
    config = fedmpi.Config.load(tmp_path / "config.toml")
    assert config.data.source.options == {"clients": 5, "classes": 4, "seed": 3}
    for wrong, words in (
        ({"data.source.cients": 5}, "did you mean clients"),
        ({"data.source.clients": "many"}, "data.source.clients = 'many' does not suit blobs:blobs"),
        ({"data.source": "digits", "data.source.classes": 4}, "data.source.classes is unknown to digits"),
    ):
        with pytest.raises(fedmpi.UserError, match=words):
            fedmpi.run("fedavg", data | wrong)


@client_sampler
class Remembers:
    state = ("kept",)

    def __init__(self, *, kind: str = "list"):
        self.kept: Any = [1] if kind == "list" else np.array(["a"]) if kind == "text" else 0

    def draw(self, view: Any) -> Cohort:
        return Cohort(view.available[:3])


@pytest.mark.parametrize("kind", ["list", "text"])
def test_state_that_no_checkpoint_can_hold_is_named(kind: str, tmp_path: Path) -> None:
    chosen = {"clients.sampler": Remembers, "clients.sampler.kind": kind, "rounds": 2, "checkpoint.every": 1}
    with pytest.raises(fedmpi.ComponentFailure, match=r"Remembers.*as 'kept', which a checkpoint cannot"):
        fedmpi.run("fedavg", chosen, out=tmp_path)


def no_view() -> Cohort:
    return Cohort([0])


class TakesAPlace:
    def __init__(self, k):
        self.k = k


def one_argument(updates):
    return updates[0]


class NoMethod:
    pass


class WrongHook(LocalAlgorithm):
    def correction(self, client):
        return None


def no_clients():
    x, y = np.zeros((0, 2), np.float32), np.zeros(0, int)
    return fedmpi.ClientArrays(x, y, y, test=(x, y))


def later(view, k=3):
    return Cohort(view.available[:k])


class Unmeasured:
    def candidates(self, view):
        return view.available

    def draw(self, view):
        return Cohort(view.available[:3])


class Pushed(LocalAlgorithm):
    def __init__(self, *, pull: Any = -1.0):
        self.proximal_mu = pull


MISFITS: list[tuple[str, Any, dict[str, Any], str]] = [
    (
        "clients.sampler",
        client_sampler(no_view),
        {},
        r"too many positional arguments\): write def no_view\(view, ",
    ),
    ("clients.sampler", client_sampler(TakesAPlace), {}, r"wants k: .*def __init__\(self, \*, k\)"),
    ("clients.sampler", client_sampler(later), {"clients.sampler.k": 4}, r"clients.sampler.k.* put a star before"),
    (
        "server.aggregator",
        aggregator(one_argument),
        {},
        r"write def one_argument\(updates, coefficients, \*, options\)",
    ),
    ("server.optimizer", server_optimizer(NoMethod), {}, r"has no method step\(w, update\)"),
    (
        "local.algorithm",
        WrongHook,
        {},
        r"which correction does not take .*write def correction\(self, client, server, generator\)",
    ),
    ("clients.sampler", client_sampler(Unmeasured), {}, r"candidates\(view\), of whom nothing is measured"),
    ("local.algorithm", Pushed, {}, r"has proximal_mu = -1.0: the weight of the pull is a finite number"),
    ("data.source", no_clients, {}, "no_clients': ClientArrays: x holds no sample"),
]
"""Key, chosen value, other settings, words of the error."""


@pytest.mark.parametrize(("key", "chosen", "others", "words"), MISFITS)
def test_what_cannot_be_called_is_rejected_before_anything_is_done(
    key: str, chosen: Any, others: dict[str, Any], words: str
) -> None:
    with pytest.raises(fedmpi.UserError, match=words) as refused:
        fedmpi.run("fedavg", {"clients.count": 4, key: chosen, **others})
    assert str(refused.value).startswith(key.partition(".")[0])


def shuffles(view):
    view.generator.shuffle(view.available)
    return Cohort(view.available[:3])


class Imaginary(LocalAlgorithm):
    def correction(self, client, server, generator):
        return server.model * 1j


class Endless(LocalAlgorithm):
    def server_step(self, server, update, sums, totals, generator):
        return update / 0


class Forgets(LocalAlgorithm):
    def finish(self, client, server, work, generator):
        client.c = work.delta


FAILURES: list[tuple[str, Any, str]] = [
    ("clients.sampler", client_sampler(shuffles), r"test_foreign_files.py:\d+\) failed in round 0: .*read-only"),
    ("server.weights", weights(lambda cohort, sizes: cohort.clients * 0), "all participants the coefficient 0"),
    ("server.optimizer", server_optimizer(lambda w, update: w * 1j), "complex numbers: return real ones"),
    (
        "clients.availability",
        lambda view: np.full(len(view.sizes), 1 + 0j),
        "returned complex128 of shape .*: return a",
    ),
    (
        "clients.sampler",
        client_sampler(lambda view: Cohort(view.available[:2], np.full(2, 0.1 + 0j))),
        "returned inclusion of complex128, shape .*: give one number a client",
    ),
    ("local.algorithm", Imaginary, r"client .*the correction must be a vector of \d+ real numbers, not complex ones"),
    ("server.optimizer", server_optimizer(lambda w, update: None), "returned nothing and left w as it was"),
    ("local.algorithm", Endless, "the update of server_step is not finite"),
    ("local.algorithm", Forgets, r"test_foreign_files.py:\d+\) failed in round 0, client \d+: .*client.c is not kept"),
]


@pytest.mark.parametrize(("key", "chosen", "words"), FAILURES)
def test_a_mistake_at_work_is_named_with_its_line(key: str, chosen: Any, words: str) -> None:
    with pytest.raises(fedmpi.ComponentFailure, match=words):
        fedmpi.run("fedavg", {"rounds": 2, "clients.count": 4, key: chosen})


def looks_back(view: Any) -> Cohort:
    return Cohort(view.available[np.argsort(view.last("loss"))[:3]])


def looks_now(view: Any) -> Cohort:
    return Cohort(view.available[np.argsort(view.fresh("loss"))[:3]])


@pytest.mark.parametrize(("sampler", "option"), [(looks_back, "needs"), (looks_now, "measures")])
def test_a_sampler_that_asks_for_numbers_without_saying_so_is_named(sampler: Any, option: str) -> None:
    words = rf"^clients.sampler = '.*test_foreign_files:{sampler.__name__}': view\..*\({option}=\('loss',\)\)"
    with pytest.raises(fedmpi.UserError, match=words):
        fedmpi.run("fedavg", {"rounds": 2, "clients.sampler": client_sampler(sampler)})


class FailsLate(nn.Module):
    """Fails on many samples, in evaluation mode only: not when it is tried."""

    most = 50

    def __init__(self, description: Any):
        super().__init__()
        self.layer = nn.Linear(64, description.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and len(x) > self.most:
            raise ZeroDivisionError("late")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("given", [FailsLate, FailsLate(SimpleNamespace(classes=10))], ids=["class", "network"])
def test_a_model_that_fails_while_it_is_evaluated_is_named_with_its_line(given: Any) -> None:
    words = r"^the model .*FailsLate \(.*test_foreign_files.py:\d+\) failed in round 0: ZeroDivisionError: late$"
    with pytest.raises(fedmpi.ComponentFailure, match=words) as caught:
        fedmpi.run("fedavg", {"rounds": 1, "clients.count": 4, "model.name": given})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class FailsAtOnce(FailsLate):
    """Model that fails when it is tried: on any samples, on few, or where gradients are requested."""

    def __init__(self, description: Any, *, when: str = "always"):
        super().__init__(description)
        self.when, self.drops = when, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = {"always": True, "gradients": torch.is_grad_enabled(), "alone": len(x) == 2}
        if late[self.when] and (self.training or self.when == "alone"):
            raise ZeroDivisionError(self.when)
        return self.layer(self.drops(x.flatten(1)))


@pytest.mark.parametrize(("when", "asked"), [("always", {}), ("gradients", {"logging.diagnostics": True})])
def test_a_model_that_fails_when_it_is_tried_is_named_with_its_line(when: str, asked: dict[str, Any]) -> None:
    words = (
        r"^the model .*FailsAtOnce \(.*test_foreign_files.py:\d+\) failed: it cannot read image samples of shape "
        rf"\(1, 8, 8\) \(synthetic, before the first round\): ZeroDivisionError: {when}$"
    )
    keys = {"rounds": 1, "clients.count": 4, "model.name": FailsAtOnce, "model.when": when, **asked}
    with pytest.raises(fedmpi.ComponentFailure, match=words) as caught:
        fedmpi.run("fedavg", keys)
    line = int(caught.value.where.rpartition(":")[2])
    assert "raise ZeroDivisionError(self.when)" in Path(__file__).read_text().splitlines()[line - 1]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class OfType(nn.Module):
    """Model of another type, to which it converts its samples or not."""

    def __init__(self, description: Any, *, dtype: str, converts: bool):
        super().__init__()
        self.layer, self.converts = nn.Linear(64, description.classes).to(getattr(torch, dtype)), converts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer((x.to(self.layer.weight.dtype) if self.converts else x).flatten(1))
        return logits


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_model_of_another_type_takes_samples_for_float32_or_is_rejected(dtype: str) -> None:
    keys = {"rounds": 1, "clients.count": 4, "model.name": OfType, "model.dtype": dtype}
    if dtype == "float64":
        with pytest.raises(fedmpi.ComponentFailure, match=r"test_foreign_files.py:\d+\) failed .* same dtype"):
            fedmpi.run("fedavg", {**keys, "model.converts": False})
        run = fedmpi.run("fedavg", {**keys, "model.converts": True})
        assert next(run.model.parameters()).dtype == torch.float64
        return
    for converts in (False, True):
        with pytest.raises(
            fedmpi.UserError, match=f"^the model's parameters are torch.{dtype}, which no engine trains"
        ):
            fedmpi.run("fedavg", {**keys, "model.converts": converts})


def test_weights_that_need_probabilities_name_the_sampler_without_them() -> None:
    inverse = weights(normalized=False)(lambda cohort, sizes: 0.1 / cohort.inclusion)
    quiet = client_sampler(lambda view: Cohort(view.available[:3]))
    with pytest.raises(fedmpi.ComponentFailure, match=r"cohort.inclusion is None, since clients.sampler"):
        fedmpi.run("fedavg", {"rounds": 1, "clients.sampler": quiet, "server.weights": inverse})
    run = fedmpi.run("fedavg", {"rounds": 1, "clients.sampler": "uniform", "server.weights": inverse})
    assert run.records[0]["participants"] > 0


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        ("numpy", lambda view: np.random.permutation(view.available)),  # noqa: NPY002
        ("torch", lambda view: torch.randperm(len(view.available)).numpy()),
        (None, lambda view: view.generator.permutation(view.available)),
    ],
)
def test_the_log_warns_of_draws_that_no_seed_sets(
    generator: str | None, draw: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        fedmpi.run("fedavg", {"rounds": 2, "clients.sampler": client_sampler(lambda v: Cohort(draw(v)[:3]))})
    warnings = [record.getMessage() for record in caplog.records if "global generator" in record.getMessage()]
    assert len(warnings) == (generator is not None)
    assert generator is None or f"global generator of {generator}," in warnings[0]


BROKEN = {
    "colonless": "def draw(view)\n    return 3\n",
    "related": "from .near import draw\n",
    "misspelt": "from fedmpi import weights\n\n\n@weights(per_samples=True)\ndef root(cohort, sizes): ...\n",
    "loading": "import json\n\nTABLE = json.loads('{')\n",
}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("colonless:draw", r"SyntaxError: expected ':' \(colonless.py, line 1\)"),
        ("related:draw", r"relative import.*related.py:1\)"),
        ("misspelt:root", r"unexpected keyword argument 'per_samples' \(.*misspelt.py:4\)"),
        ("loading:draw", r"JSONDecodeError: .*loading.py:3\)"),
        ("./loading.py:draw", r"'./loading.py' is no module: write module:object, .* as 'loading:draw'"),
        ("loading.py:draw", "as 'loading:draw'"),
        ("loading.draw", "did you mean 'loading:draw'"),
        ("statistics:draw", "it is Python's own, .*give your file another name"),
        ("nowhere:draw", "No module named 'nowhere'"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_its_line(
    choice: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(fedmpi.UserError, match=words):
        fedmpi.run("fedavg", {"clients.sampler": choice})


def test_a_model_that_cannot_be_built_fails_by_its_name_and_line_on_all_ranks_with_1(tmp_path: Path) -> None:
    (tmp_path / "unfinished.py").write_text("def net(description, *, width=3):\n    return nn.Linear(64, width)\n")
    words = ["--out", "run", "--set", "preset=fedavg", "--set", "model.name=unfinished:net", "--set", "rounds=1"]
    done = run_mpi(3, ["-m", "fedmpi", "train", *words], cwd=tmp_path)
    said = f"error: the model unfinished:net ({tmp_path}/unfinished.py:2) failed: NameError: name 'nn' is not defined"
    assert done.returncode == 1 and done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr


@weights(per_sample=True, normalized=False)
def share_of_all(cohort: Cohort, sizes: Any, *, part: float = 1.0) -> Any:
    return np.full(len(cohort.clients), part / sizes[cohort.clients].sum())


def test_what_a_partial_binds_stays_what_its_author_made_of_it(tmp_path: Path) -> None:
    fixed = SAME | {"local.engine": "sequential"}
    whole = fedmpi.run("fedavg", {**fixed, "server.weights": share_of_all, "server.weights.part": 0.3})
    bound = fedmpi.run("fedavg", {**fixed, "server.weights": partial(share_of_all, part=0.3)}, out=tmp_path / "run")
    assert facts(bound) == facts(whole), "its marks count"
    assert list((tmp_path / "run" / "plugins").rglob("*.py")), "its source is kept"
    assert "part = 0.3" in (tmp_path / "run" / "config.toml").read_text()


def test_a_network_that_no_folder_can_build_again_is_said_to_be_one(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    fedmpi.run("fedavg", SAME | {"rounds": 1}, model=network, out=tmp_path)
    with pytest.raises(fedmpi.UserError, match="given a network itself.*model.safetensors"):
        _ = fedmpi.load_run(tmp_path).model
