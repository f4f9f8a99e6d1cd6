"""Models by name or import path, the same on every rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fedmpi import ComponentFailure, UserError, components
from fedmpi.data.schema import DataDescription
from fedmpi.models import build, check_model_options
from tests.local.synthetic import SMALL_IMAGES, TEXTS

PICTURES = DataDescription((3, 32, 32), "uint8", 10, "image", 0, (0.5,), (0.25,))
USERS_MODULE = """from torch import nn
import fedmpi

def net(description, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, width), nn.Linear(width, description.classes))

def wrong(description):
    return 3

def failing(description):
    raise RuntimeError("no such layer")

def leaving(description):
    raise SystemExit(0)

def nothing():
    return None

def refusing(description):
    raise fedmpi.UserError("images of 6 pixels are too small for me")

class Failing(nn.Module):
    def __init__(self, description):
        super().__init__()
        width = description.classes
        self.layer = nn.Linear(36, width // 0)
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_fl_models.py").write_text(USERS_MODULE)
    (tmp_path / "my_broken_models.py").write_text("import a_package_nobody_has")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_fl_models", "my_broken_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_fl_models"


def weights(name: str, seed: int) -> torch.Tensor:
    model = build(name, {}, SMALL_IMAGES, seed)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_same_seed_gives_the_same_weights_whatever_torchs_generator_does():
    torch.manual_seed(1)
    first = weights("mlp", 5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(weights("mlp", 5), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(weights("mlp", 6), first)


@pytest.mark.parametrize("name", [part.name for part in components("model")])
def test_every_registered_model_can_be_found(name: str):
    description = TEXTS if name not in ("mlp", "cnn", "cifar-cnn", "image-cnn", "resnet18") else SMALL_IMAGES
    with pytest.raises(UserError, match="no_such_option"):
        build(name, {"no_such_option": 1}, description, 0)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="'mpl' is unknown: did you mean 'mlp'"):
        build("mpl", {}, SMALL_IMAGES, 0)


@pytest.mark.parametrize(
    "name, words",
    [
        ("my_fl_models:nett", "has no function or class 'nett': did you mean 'net'"),
        ("my_missing_models:net", "importing the module 'my_missing_models' failed"),
        ("my_broken_models:net", "No module named 'a_package_nobody_has'"),
        ("my_fl_models:nothing", r"is called with description, which it does not take .*: write def nothing\("),
        ("my_fl_models:refusing", "^images of 6 pixels are too small for me$"),
    ],
)
def test_what_is_wrong_with_a_users_choice_of_a_model_is_said(users_module: str, name: str, words: str):
    with pytest.raises(UserError, match=words):
        build(name, {}, SMALL_IMAGES, 0)


@pytest.mark.parametrize(
    "name, words",
    [
        ("wrong", r"my_fl_models.py:7\) failed: it returned int: return a torch.nn.Module"),
        ("failing", r"my_fl_models.py:11\) failed: RuntimeError: no such layer"),
        ("leaving", r"my_fl_models.py:14\) failed: SystemExit: 0"),
        ("Failing", r"my_fl_models.py:26\) failed: ZeroDivisionError"),
    ],
)
def test_a_users_model_that_fails_is_named_with_its_line(users_module: str, name: str, words: str):
    with pytest.raises(ComponentFailure, match=f"^the model my_fl_models:{name} .*{words}") as caught:
        build(f"{users_module}:{name}", {}, SMALL_IMAGES, 0)
    assert (caught.value.__cause__ is None) is (name == "wrong")


def test_what_a_built_in_model_cannot_be_built_with_is_the_users_to_change():
    with pytest.raises(UserError, match=r"model.name = 'cifar-cnn': building it failed with ValueError: dropout prob"):
        build("cifar-cnn", {"dropout": 2.0}, PICTURES, 0)


def test_a_module_takes_no_options() -> None:
    with pytest.raises(UserError, match="model.hidden has no effect on a model that is given as a module"):
        check_model_options(torch.nn.Linear(2, 2), {"hidden": [3], "lora": None})
    assert check_model_options(torch.nn.Linear(2, 2), {"lora": None}) == {}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_network_that_has_no_copy_is_rejected_with_what_to_do():
    with pytest.raises(UserError, match="Linear given as the model cannot be copied: give a function that builds it"):
        build(torch.nn.utils.weight_norm(torch.nn.Linear(36, 5)), {}, SMALL_IMAGES, seed=0)
