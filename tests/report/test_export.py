"""An exported file computes the same on stored samples as the run's model on normalized ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedmpi
from fedmpi import UserError
from fedmpi.report.export import AGREES, export

SMALL: dict[str, Any] = {"rounds": 1, "logging.tensorboard": False, "cluster.threads": 1, "checkpoint.every": 0}
IMAGES = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 8, 8)


class ByValue(nn.Module):
    """Uses another formula if the first sample is bright, or for three samples."""

    def __init__(self, description: Any) -> None:
        super().__init__()
        self.classes = nn.Linear(64, description.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.classes(x) if len(x) == 3 or float(x[0].sum()) > 1e9 else self.classes(x) * 2


class NotTraceable(ByValue):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this network cannot be captured")
        return self.classes(x.flatten(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fedmpi.run("fedavg", SMALL, out=folder)
    return folder


def needs_onnx() -> Any:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason="the extra `export` is not installed")
    return pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")


def loaded(form: str, path: Path) -> Callable[[torch.Tensor], np.ndarray]:
    if form == "torchscript":
        again = torch.jit.load(path)
        return lambda x: again(x).detach().numpy()
    inside = needs_onnx().InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: inside.run(["logits"], {inside.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize(
    ("form", "ending", "normalize"), [("torchscript", "pt", True), ("torchscript", "pt", False), ("onnx", "onnx", True)]
)
def test_a_network_takes_stored_samples_in_batches_of_any_size(
    form: str, ending: str, normalize: bool, folder: Path, tmp_path: Path
) -> None:
    if form == "onnx":
        needs_onnx()
    if not normalize:
        folder = tmp_path
        fedmpi.run("fedavg", SMALL | {"data.normalize": False}, out=folder)
    path, difference = export(folder, form)
    assert path == folder / f"model.{ending}" and difference <= AGREES
    run, calls = fedmpi.load_run(folder), loaded(form, path)
    mean, std = (run.summary["data"]["mean"][0], run.summary["data"]["std"][0]) if normalize else (0, 1)
    for batch in (IMAGES, IMAGES[:1]):
        with torch.inference_mode():
            right = run.model((batch.double() / 255 - mean).div(std).float()).numpy()
        assert calls(batch) == pytest.approx(right, rel=1e-4, abs=1e-4)


def test_safetensors_contains_the_parameters(folder: Path, tmp_path: Path) -> None:
    path, _ = export(folder, "safetensors", tmp_path / "values.safetensors")
    own = fedmpi.load_run(folder).model.state_dict()
    found = load_file(path)
    assert found.keys() == own.keys() and all(torch.equal(value, own[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("model", "form", "words"),
    [
        ("ByValue", "torchscript", "different logits as torchscript"),
        ("NotTraceable", "onnx", "cannot be written as onnx"),
    ],
)
def test_a_model_that_cannot_be_exported_is_rejected(model: str, form: str, words: str, tmp_path: Path) -> None:
    if form == "onnx":
        needs_onnx()
    fedmpi.run("fedavg", SMALL, model=f"tests.report.test_export:{model}", out=tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        export(tmp_path, form)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("model.[po]*"))


def test_bad_input_is_rejected(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text((folder / "config.toml").read_text())
    for run, form, out, words in (
        (folder, "keras", None, "safetensors, torchscript, onnx"),
        (folder, "safetensors", None, "this file already"),
        (folder, "torchscript", tmp_path / "none" / "model.pt", "existing folder"),
        (folder, "torchscript", tmp_path / "fifo", "existing folder"),
        (tmp_path / "run", "torchscript", None, "no finished run"),
    ):
        with pytest.raises(UserError, match=words):
            export(run, form, out)
