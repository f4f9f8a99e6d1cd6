"""Messages to users who write their first components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import Cohort, LocalAlgorithm, aggregator, client_sampler, server_optimizer, weights


@client_sampler
class Remembers:
    state = ("kept",)

    def __init__(self) -> None:
        self.kept: Any = [1]

    def draw(self, view: Any) -> Cohort:
        return Cohort(view.available[:3])


def test_state_that_no_checkpoint_can_hold_is_named(tmp_path: Path) -> None:
    chosen = {"clients.sampler": Remembers, "rounds": 2, "checkpoint.every": 1}
    with pytest.raises(fedmpi.ComponentFailure, match="Remembers.*as 'kept', which a checkpoint cannot"):
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


class NeedsMore:
    def combine(self, updates, coefficients, *, clients):
        return updates[0]

    def after(self, clients):
        pass


class WrongHook(LocalAlgorithm):
    def correction(self, client):
        return None


def later(view, k=3):
    return Cohort(view.available[:k])


MISFITS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("clients.sampler", client_sampler(no_view), {}, "is called with view, which"),
    ("clients.sampler", client_sampler(TakesAPlace), {}, r"def __init__\(self, \*, k\)"),
    ("clients.sampler", client_sampler(later), {"clients.sampler.k": 4}, "put a star before"),
    ("server.aggregator", aggregator(one_argument), {}, "is called with updates, coefficients, which"),
    ("server.aggregator", aggregator(NeedsMore), {}, "is called with clients, measured, which after does not take"),
    ("server.optimizer", server_optimizer(NoMethod), {}, r"has no method step\(w, update\)"),
    ("local.algorithm", WrongHook, {}, "is called with client, server, generator, which"),
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


class Endless(LocalAlgorithm):
    def server_step(self, server, update, sums, totals, generator):
        return update / 0


class Forgets(LocalAlgorithm):
    def finish(self, client, server, work, generator):
        client.c = work.delta


FAILURES: list[tuple[str, Any, str]] = [
    ("clients.sampler", client_sampler(shuffles), r"test_foreign_files.py:\d+\) failed in round 0: .*read-only"),
    ("clients.sampler", client_sampler(lambda view: Cohort(view.available[:2], np.full(2, 1j))), "inclusion"),
    ("clients.availability", lambda view: np.full(len(view.sizes), 1 + 0j), "complex128"),
    ("server.weights", weights(lambda cohort, sizes: cohort.clients * 0), "the coefficient 0"),
    ("server.optimizer", server_optimizer(lambda w, update: w * 1j), "tensor of real numbers"),
    ("server.optimizer", server_optimizer(lambda w, update: None), "returned nothing and left w as it was"),
    ("local.algorithm", Endless, "the update of server_step is not finite"),
    ("local.algorithm", Forgets, r"test_foreign_files.py:\d+\) failed in round 0, client \d+: .*client.c is not kept"),
]


@pytest.mark.parametrize(("key", "chosen", "words"), FAILURES)
def test_a_mistake_at_work_is_named_with_its_line(key: str, chosen: Any, words: str) -> None:
    with pytest.raises(fedmpi.ComponentFailure, match=words):
        fedmpi.run("fedavg", {"rounds": 2, "clients.count": 4, key: chosen})


class Fails(nn.Module):
    """Model that fails in training when it is tried, or on many samples in evaluation mode only."""

    most = 50

    def __init__(self, description: Any, *, when: str = "at once"):
        super().__init__()
        self.when, self.layer = when, nn.Linear(64, description.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training if self.when == "at once" else not self.training and len(x) > self.most:
            raise ZeroDivisionError(self.when)
        return self.layer(x.flatten(1))


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("at once", r"failed: it cannot read image samples of shape \(1, 8, 8\).*: ZeroDivisionError: at once$"),
        ("late", "failed in round 0: ZeroDivisionError: late$"),
    ],
)
def test_a_model_that_fails_is_named_with_its_line(when: str, words: str) -> None:
    words = rf"^the model .*Fails \(.*test_foreign_files.py:\d+\) {words}"
    keys = {"rounds": 1, "clients.count": 4, "model.name": Fails, "model.when": when}
    with pytest.raises(fedmpi.ComponentFailure, match=words) as caught:
        fedmpi.run("fedavg", keys)
    line = int(caught.value.where.rpartition(":")[2])
    assert "raise ZeroDivisionError(self.when)" in Path(__file__).read_text().splitlines()[line - 1]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


BROKEN = {
    "colonless": "def draw(view)\n    return 3\n",
    "misspelt": "from fedmpi import weights\n\n\n@weights(per_samples=True)\ndef root(cohort, sizes): ...\n",
    "loading": "import json\n\nTABLE = json.loads('{')\n",
}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("colonless:draw", r"SyntaxError: expected ':' \(colonless.py, line 1\)"),
        ("misspelt:root", r"unexpected keyword argument 'per_samples' \(.*misspelt.py:4\)"),
        ("loading:draw", r"JSONDecodeError: .*loading.py:3\)"),
        ("./loading.py:draw", r"'./loading.py' is no module. Write module:object, .* as 'loading:draw'"),
        ("statistics:draw", "it is Python's own, .*give your file another name"),
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


def test_a_network_that_no_folder_can_build_again_is_said_to_be_one(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    fedmpi.run("fedavg", {"rounds": 1, "clients.count": 4}, model=network, out=tmp_path)
    with pytest.raises(fedmpi.UserError, match="given a network itself.*model.safetensors"):
        _ = fedmpi.load_run(tmp_path).model
