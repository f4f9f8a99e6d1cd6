"""What an exported file computes on stored samples is what the run's model computes on normalized ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedmpi
from fedmpi import UserError
from fedmpi.report.export import AGREES, export

SMALL: dict[str, Any] = {"rounds": 1, "logging.tensorboard": False, "cluster.threads": 1, "checkpoint.every": 0}
IMAGES = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fedmpi.run("fedavg", SMALL, out=folder)
    return folder


def logits(folder: Path, stored: torch.Tensor) -> np.ndarray:
    """The run's own model on samples, normalized by hand."""
    run = fedmpi.load_run(folder)
    mean, std = run.summary["data"]["mean"][0], run.summary["data"]["std"][0]
    with torch.inference_mode():
        return run.model((stored.double() / 255 - mean).div(std).float()).numpy()


def test_torchscript_takes_stored_samples_in_batches_of_any_size(folder: Path) -> None:
    path, difference = export(folder, "torchscript")
    assert path == folder / "model.pt" and difference <= AGREES
    again = torch.jit.load(path)
    for batch in (IMAGES, IMAGES[:1]):
        assert again(batch).detach().numpy() == pytest.approx(logits(folder, batch), rel=1e-4, abs=1e-4)


def test_onnx_takes_stored_samples_in_batches_of_any_size(folder: Path) -> None:
    pytest.importorskip("onnx", reason="the extra `export` is not installed")
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    path, difference = export(folder, "onnx")
    assert path == folder / "model.onnx" and difference <= AGREES
    inside = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (IMAGES, IMAGES[:1]):
        (found,) = inside.run(["logits"], {inside.get_inputs()[0].name: batch.numpy()})
        assert found == pytest.approx(logits(folder, batch), rel=1e-4, abs=1e-4)


def test_safetensors_holds_the_models_values(folder: Path, tmp_path: Path) -> None:
    path, _ = export(folder, "safetensors", tmp_path / "values.safetensors")
    own = fedmpi.load_run(folder).model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in load_file(path).items())
    with pytest.raises(UserError, match="that file already"):
        export(folder, "safetensors")


def test_without_normalization_bytes_become_shares_of_255(tmp_path: Path) -> None:
    fedmpi.run("fedavg", SMALL | {"data.normalize": False}, out=tmp_path)
    again = torch.jit.load(export(tmp_path, "torchscript")[0])
    with torch.inference_mode():
        right = fedmpi.load_run(tmp_path).model(IMAGES.float() / 255).numpy()
    assert again(IMAGES).detach().numpy() == pytest.approx(right, rel=1e-4, abs=1e-4)


def test_a_model_that_a_file_would_compute_wrongly_is_refused(tmp_path: Path) -> None:
    fedmpi.run("fedavg", SMALL, model="tests.report.own_models:by_value", out=tmp_path)
    with pytest.raises(UserError, match="computes something else as torchscript"):
        export(tmp_path, "torchscript")
    assert not (tmp_path / "model.pt").exists()


def test_a_model_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    fedmpi.run("fedavg", SMALL, model="tests.report.own_models:in_numpy", out=tmp_path)
    with pytest.raises(UserError, match="cannot be written as ONNX") as caught:
        export(tmp_path, "onnx")
    assert "\n" not in str(caught.value) and not (tmp_path / "model.onnx").exists()


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for form, out, words in (
        ("keras", None, "choose one of safetensors, torchscript, onnx"),
        ("torchscript", tmp_path / "none" / "model.pt", "in a folder that is there"),
        ("torchscript", tmp_path / "fifo", "in a folder that is there"),
    ):
        with pytest.raises(UserError, match=words):
            export(folder, form, out)
    (tmp_path / "config.toml").write_text((folder / "config.toml").read_text())
    with pytest.raises(UserError, match="no finished run"):
        export(tmp_path, "torchscript")
