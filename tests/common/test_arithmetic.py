"""Arithmetic of devices: repeatable in exact runs, in full precision while a model is tried. Needs no GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fedmpi import UserError
from fedmpi.common.arithmetic import FIXED_WORKSPACE, WORKSPACE, full_precision
from fedmpi.config import load_config
from fedmpi.core.placement import prepare_device
from fedmpi.local.traits import forward_traits
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from tests.local.synthetic import SMALL_IMAGES


@pytest.fixture(autouse=True)
def as_torch_begins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TensorFloat-32 allowed wherever it can be, nothing repeatable; as it was afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    precision, filled = torch.get_float32_matmul_precision(), torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_deterministic_debug_mode("default")
    torch.set_float32_matmul_precision("high")
    yield
    os.environ.pop(WORKSPACE, None)
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(deterministic)
    torch.set_float32_matmul_precision(precision)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def prepare(exact: bool, *more: str) -> None:
    settings = ["preset=fedavg", "cluster.device=cpu", f"server.exact={str(exact).lower()}", *more]
    prepare_device(load_config(None, settings), Cluster.connect())


def test_exact_runs_are_bit_identical_every_time():
    prepare(exact=True)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    assert os.environ[WORKSPACE] == FIXED_WORKSPACE == ":4096:8"


def test_exact_runs_do_not_load_torchs_compiler_which_takes_seconds(monkeypatch: pytest.MonkeyPatch):
    for name in ("torch._inductor", "torch._inductor.config", "torch._dynamo"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        torch.use_deterministic_algorithms(True)
    prepare(exact=True)


def test_every_run_computes_float32_products_in_float32_and_leaves_room_for_a_later_exact_run():
    prepare(exact=False)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
    assert os.environ[WORKSPACE] == FIXED_WORKSPACE


def test_tensor_float_32_is_for_gpus_alone_and_not_for_exact_runs(monkeypatch: pytest.MonkeyPatch):
    prepare(False, "local.precision=tf32")
    assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setattr(Cluster, "device", lambda *_: torch.device("cuda", 0))
    prepare(False, "local.precision=tf32")
    assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "high"
    with pytest.raises(UserError, match="server.exact"):
        prepare(True, "local.precision=tf32")


def test_full_precision_ends_with_its_block_even_by_an_error():
    with pytest.raises(ZeroDivisionError), full_precision():
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        raise ZeroDivisionError
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32


class RoughProduct(nn.Module):
    """A dense layer whose product has the errors of TensorFloat-32 while that is allowed, other ones a batch size."""

    def __init__(self, roughness: float, always: bool = False):
        super().__init__()
        self.dense, self.roughness, self.always = nn.Linear(36, 5), roughness, always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rough = self.always or torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return self.dense(x.flatten(1)) * (1 + rough * self.roughness * len(x))


def couples(module: nn.Module) -> bool:
    return forward_traits(FlatModel(module), SMALL_IMAGES).couples


def test_tensor_float_32_is_not_taken_for_samples_that_influence_one_another():
    assert not couples(RoughProduct(2e-3))
    assert couples(RoughProduct(2e-3, always=True))


@pytest.mark.parametrize("exact, threads", [(False, 3), (True, 1)])
def test_a_rank_has_the_threads_that_the_user_says_but_one_where_sums_are_exact(exact: bool, threads: int):
    prepare(exact, "cluster.threads=3")
    assert torch.get_num_threads() == threads
