"""Methods do what their documentation claims: weights of strata, clients that OPTICS calls noise, stale gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn, zeros

import fedmpi

QUIET = {"logging.tensorboard": False, "cluster.threads": 1, "checkpoint.every": 0, "data.normalise": False}


class Weights(nn.Module):
    """Two parameters that start at zero: after one round each is the weight that the updates of one stratum had."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.theta).sum(1, keepdim=True)


def two_strata(each: int, small: int = 1, large: int = 40) -> fedmpi.ClientArrays:
    """`each` clients with `small` samples (1, 0) -> 1, and as many with `large` samples (0, 1) -> 1."""
    owner = np.repeat(np.arange(2 * each), np.repeat([small, large], each))
    x = np.eye(2, dtype=np.float32)[(owner >= each).astype(int)]
    y = np.ones((len(x), 1), np.float32)
    return fedmpi.ClientArrays(x, y, owner, test=(x[:2], y[:2]))


def weights_of_two_strata(count: int, seed: int, wanted: int, **settings: Any) -> np.ndarray:
    """The two weights of one round of FedSTaS in which the server asks for `wanted` samples."""
    keys = QUIET | {
        "rounds": 1, "seed": seed, "participation.features": "full-gradient", "participation.strata": 2,
        "participation.count": count, "samples.wanted": wanted, "task.kind": "regression",
        "local.lr": 0.5, "local.steps": 1, "local.batch_size": "all",
    }  # fmt: skip
    run = fedmpi.run("fedstas", keys | settings, data=two_strata(8), model=Weights())
    return run.model.theta.detach().numpy().astype(np.float64)


@pytest.mark.parametrize(
    "count, settings",
    [
        (16, {}),
        (6, {}),
        (2, {}),
        (6, {"participation.draw": "uniform", "participation.allocation": "equal"}),
        (16, {"participation.allocation": "proportional", "aggregation.optimizer": "momentum"}),
        (16, {"local.engine": "sequential", "aggregation.exact": True}),
    ],
)
def test_strata_keep_their_weight_where_participants_have_no_sampled_row(count: int, settings: dict[str, Any]) -> None:
    """Half of the clients have one sample, drawn with probability K/ñ near 1/4; a client without it changes nothing.

    FedSTaS, last line of Algorithm 2: the other stratum, all of whose clients have rows, weighs N_h/N = 1/2 whatever
    happens in the first, whose weight is 1/2 times the share of its participants with a row.
    """
    found = np.array([weights_of_two_strata(count, seed, wanted=11 * count // 2, **settings) for seed in range(3)])
    with_row = found[:, 0] * count  # m_h / (N_h / N)
    assert found[:, 1] == pytest.approx(np.full(3, 0.5), abs=1e-6)
    assert with_row == pytest.approx(np.rint(with_row), abs=1e-4)
    assert found[:, 0].min() < 0.5


def test_fewer_participants_than_strata_and_no_row_change_nothing() -> None:
    """m = 1 < H = 2: the stratum drawn counts 1/P_h = 2 times its half, and a client without a row changes nothing."""
    asked = {"samples.asked": "all"}
    runs = [weights_of_two_strata(1, seed, wanted=82, **asked) for seed in range(8)]
    found = {tuple(np.round(weights, 6).tolist()) for weights in runs}
    assert {(0.0, 1.0), (0.0, 0.0)} <= found <= {(0.0, 1.0), (0.0, 0.0), (1.0, 0.0)}
