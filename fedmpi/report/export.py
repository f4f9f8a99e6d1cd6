"""Export of a final model: its parameters (safetensors), or the network with its normalization (TorchScript, ONNX).

The network takes samples as the data set stores them (bytes of pixels, numbers, token ids) and returns logits. The file
is read again and compared with the model.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.api import load_run
from fedmpi.common.errors import UserError, raised
from fedmpi.common.files import write_named
from fedmpi.common.types import AnyArray
from fedmpi.data.schema import DataDescription
from fedmpi.data.source import Normalizer
from fedmpi.models.inputs import logits_of
from fedmpi.records.checkpoint import model_file

ENDINGS = {"safetensors": ".safetensors", "torchscript": ".pt", "onnx": ".onnx"}
AGREES = 1e-5
"""Largest difference of logits, relative to the largest of them or to 1."""
SAMPLES = (3, 5)
"""Samples of the batches with which a network is traced and compared."""


class Deployed(nn.Module):
    """Network from stored samples to logits."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, description: DataDescription):
        super().__init__()
        self.network = network
        rule = Normalizer(description, torch.device("cpu"))
        self.scaled = rule.scale is not None and rule.shift is not None
        self.register_buffer("scale", rule.scale, persistent=self.scaled)
        self.register_buffer("shift", rule.shift, persistent=self.scaled)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, C) of samples (b, \\*feature_shape)."""
        if self.scaled:
            x = x.to(torch.float32) * self.scale + self.shift
        logits: Tensor = logits_of(self.network(x))
        return logits


def export(folder: Path, form: str, out: Path | None = None) -> tuple[Path, float]:
    """Write the final model of a run; return the file and the largest relative difference of its logits."""
    if form not in ENDINGS:
        raise UserError(f"--format {form} does not exist. Choose one of {', '.join(ENDINGS)}")
    run = load_run(folder)
    path = folder / f"model{ENDINGS[form]}" if out is None else out
    if form == "safetensors" and path.resolve() == (folder / "model.safetensors").resolve():
        raise UserError(f"{path} is this file already. Name another one with --out")
    network, content, difference = run.model.eval(), b"", 0.0
    if form == "safetensors":
        content = model_file(network)
    else:
        description = DataDescription(**run.summary["data"])
        if description.inputs:
            raise UserError(f"--format {form} needs samples of one array. Export safetensors")
        model = Deployed(network, description).eval()
        batches = [_samples(description, count) for count in SAMPLES]
        with torch.inference_mode(), _quietly(form):
            content, calls = (_torchscript if form == "torchscript" else _onnx)(model, batches[0])
            difference = max(_difference(calls(batch), model(batch).numpy()) for batch in batches)
        if not difference <= AGREES:
            raise UserError(
                f"the model computes different logits as {form}, by {difference:.2g} of the largest. Its forward pass "
                "must not depend on the values or the number of samples"
            )
    write_named(path, content)
    return path, difference


def _difference(found: AnyArray, right: AnyArray) -> float:
    if found.shape != right.shape:
        return np.inf
    return float(np.abs(found.astype(np.float64) - right).max() / max(1.0, np.abs(right).max()))


def _samples(description: DataDescription, count: int) -> Tensor:
    """Return synthetic samples as the data set could store them."""
    draw, shape = np.random.Generator(np.random.Philox(count)), (count, *description.feature_shape)
    if description.dtype == "float32":
        return torch.from_numpy(draw.standard_normal(shape, np.float32))
    end = 256 if description.dtype == "uint8" else max(description.vocabulary, 1)
    return torch.from_numpy(draw.integers(0, end, shape).astype(description.dtype))


def _torchscript(model: Deployed, batch: Tensor) -> tuple[bytes, Callable[[Tensor], AnyArray]]:
    """Return the content of the file, and the function that a program which reads it computes."""
    jit: Any = torch.jit
    buffer = io.BytesIO()
    jit.save(jit.trace(model, (batch,), check_trace=False), buffer)
    again = jit.load(io.BytesIO(buffer.getvalue()))
    return buffer.getvalue(), lambda x: np.asarray(again(x).numpy())


def _onnx(model: Deployed, batch: Tensor) -> tuple[bytes, Callable[[Tensor], AnyArray]]:
    try:
        runtime, *_ = (importlib.import_module(name) for name in ("onnxruntime", "onnx", "onnxscript"))
    except ImportError as error:
        raise UserError(f"ONNX needs {error.name}. Install it with pip install 'fedmpi[export]'") from None
    program: Any = torch.onnx.export(
        model,
        (batch,),
        input_names=["samples"],
        output_names=["logits"],
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
        dynamo=True,
        verbose=False,
    )
    content = program.model_proto.SerializeToString()
    inside = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda x: np.asarray(inside.run(None, {inside.get_inputs()[0].name: x.numpy()})[0])


@contextmanager
def _quietly(form: str) -> Iterator[None]:
    """Silence torch's remarks on its exporters, and report a failure in one sentence."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except UserError:
        raise
    except Exception as error:
        words = raised(error.__cause__ or error)[:300]
        raise UserError(f"the model cannot be written as {form}: {words}") from error
    finally:
        logging.disable(level)
