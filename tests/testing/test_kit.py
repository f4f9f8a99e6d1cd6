"""The conformance kit: good components pass, and every broken contract is caught by the check meant for it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmpi.testing
from data_prep.raw import RawDataset
from fedmpi import ClientArrays, ClientFailure, Cohort, ComponentFailure, UserError, aggregator, data_sampler
from fedmpi.cli import app
from fedmpi.common.registry import resolve
from fedmpi.testing import CheckFailed, CheckSkipped, checks, perform
from fedmpi.testing.check import Subject
from fedmpi.testing.selection import _chance, stated_inclusion, world
from tests.testing import bad_parts

VALID, AGAIN = "valid results", "same results again"
BATCHES = "evaluation does not depend on the batches"
STATED = "inclusion probabilities over 10,000 draws"


def varying(view):
    count = min(2 + 2 * (view.round % 2), len(view.available))
    chosen = np.sort(view.generator.choice(view.available, count, replace=False))
    return Cohort(chosen, np.full(count, count / len(view.available)))


def by_size(view):
    p = view.sizes[view.available] / view.sizes[view.available].sum()
    chosen = np.sort(view.generator.choice(view.available, view.count, replace=False, p=p))
    return Cohort(chosen, np.full(len(chosen), view.count / len(view.available)))


def named_twice(view):
    p = 1.0 + (view.available + view.round) % 3
    p = (p / p.sum()).astype(np.float64)
    drawn = view.generator.choice(len(p), view.count, p=p)
    return Cohort(view.available[drawn].tolist(), (view.count * p[drawn]).tolist(), multiplicity=[1] * len(drawn))


def linear(description, outputs=None):
    values = int(np.prod(description.feature_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(values, outputs or description.classes))


class Centered(nn.Module):
    """Linear model of samples without the mean of their batch."""

    def __init__(self, description: Any):
        super().__init__()
        self.inner = linear(description)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


def seven_features(description):
    assert description.feature_shape == (7,), "seven features"
    return nn.Linear(7, description.classes)


def raw(**changes: Any) -> RawDataset:
    labels = np.arange(40) % 3
    x = np.arange(80, dtype=np.float32).reshape(40, 2)
    given = {
        **{"name": "raw", "task": "vector", "classes": 3, "class_names": ("a", "b", "c"), "feature_shape": (2,)},
        **{"dtype": "float32", "mean": (0.0,), "std": (1.0,), "read": lambda rows: x[rows], "y": labels},
        **{"train": np.arange(40), "test": np.arange(9)},
    }
    return RawDataset(**given | changes)


def three_clients(first=0.0):
    x = np.arange(60, dtype=np.float32).reshape(20, 3) + first
    return ClientArrays(x, np.arange(20) % 4, np.arange(20) % 3, test=(x[:4], np.arange(4)))


def probability(outputs, targets):
    return 1 - outputs.softmax(1).gather(1, targets[:, None]).squeeze(1)


GOOD: dict[str, list[Any]] = {
    "client sampler": [varying, named_twice, bad_parts.Remembers],
    "data sampler": [
        bad_parts.half,
        data_sampler(pooled=True)(lambda pool: np.arange(pool.start + -pool.start % 3, pool.stop, 3)),
    ],
    "weights": [bad_parts.root],
    "aggregator": [aggregator(lambda updates, coefficients: (updates.amax(0) + updates.amin(0)) / 2)],
    **dict.fromkeys(("compressor", "attack"), [lambda update, generator: update.mul_(generator.random() < 2)]),
    "loss": [probability],
    "metric": [lambda outputs, targets: {"sure": outputs.softmax(1).amax(1).sum()}, bad_parts.LeastRecall],
    "partition": [lambda labels, clients, generator: (np.arange(len(labels)) + 1) % (clients or 5)],
    "availability": [lambda view: np.full(len(view.sizes), min(1.0, 0.2 * (view.round + 1)))],
    "scheduling": [lambda class_counts, most, generator, target: np.arange(len(class_counts)) // most],
    "model": [linear],
    "data set": [bad_parts.points, lambda: raw()],
    "local algorithm": [bad_parts.OneName],
    "server optimizer": [bad_parts.Counting, lambda w, update: w + update],
    "local optimizer": [bad_parts.Steps],
    "data source": [three_clients],
}
BAD = [
    (
        "client sampler",
        lambda view: Cohort(np.random.default_rng().permutation(view.available)[: view.count]),
        AGAIN,
        "two different results",
    ),
    ("client sampler", by_size, STATED, "states the inclusion probability 0.3"),
    ("client sampler", lambda view: Cohort(np.arange(view.count)), VALID, "client [0-4], .* view.available"),
    ("client sampler", lambda view: Cohort(view.available[:0]), VALID, "has participants"),
    (
        "client sampler",
        lambda view: Cohort(view.available[range(view.count)]),
        "rounds with few available clients",
        "IndexError",
    ),
    (
        "client sampler",
        lambda view: Cohort(view.available[(view.available[:, None] > view.available).sum(1) < view.count]),
        "cost with 100,000 clients",
        "Use arrays",
    ),
    ("data sampler", lambda client: np.arange(len(client.labels))[::-1], VALID, "not sorted"),
    ("weights", bad_parts.negative, VALID, "coefficient -"),
    ("weights", bad_parts.of_everybody, VALID, r"shape \(9,\).*shape \(5,\)"),
    ("aggregator", bad_parts.shortest, "slices of the coordinates agree with the whole", "measure"),
    ("compressor", lambda update, generator: update[:9], VALID, r"shape \(9,\)"),
    ("loss", lambda x, y: probability(x, y).mean(), VALID, "a single number"),
    ("loss", lambda x, y: probability(x, y) / 0, VALID, "the loss is nan"),
    ("metric", lambda x, y: {"sure": x.softmax(1).amax(1).mean()}, BATCHES, "test_sure.*add up over batches"),
    ("metric", lambda x, y: {"surprise": torch.tensor(torch.nan)}, VALID, "not finite"),
    (
        "partition",
        lambda labels, clients, generator: np.where(labels == 0, -2, 0),
        VALID,
        "client -2: clients count from 0",
    ),
    ("partition", lambda labels, clients, generator: [labels.sort(), labels][1], VALID, "read-only"),
    (
        "partition",
        lambda labels, clients, generator: (labels[:, None] == labels).sum(1) % clients,
        "cost with 100,000 samples",
        "Use arrays",
    ),
    ("local algorithm", bad_parts.WrongNames, VALID, r"finish returned \['norm'\], but sums"),
    ("local algorithm", bad_parts.NearlyNamed, "names that are read", "'proximal', .* mean 'proximal_mu'"),
    ("local algorithm", bad_parts.PulledByWords, VALID, "has proximal_mu = 'a lot'"),
    ("local algorithm", bad_parts.NoisyAlgorithm, AGAIN, "two different results"),
    ("availability", lambda view: view.sizes / 9, VALID, "probabilities"),
    (
        "scheduling",
        lambda class_counts, most, generator, target: np.zeros(len(class_counts), np.int64),
        VALID,
        "5 clients to one mediator",
    ),
    ("model", lambda description: linear(description, 1), VALID, r"of shape \(samples, 10\)"),
    ("model", Centered, BATCHES, "test_loss .*from that sample only"),
    ("local optimizer", bad_parts.Accumulating, AGAIN, "two different results"),
    ("data set", lambda: raw(y=1 + np.arange(40) % 3), VALID, "none of the 3 classes"),
    ("data set", lambda: raw(feature_shape=(3,)), VALID, "is stated"),
    (
        "data set",
        lambda: raw(read=lambda rows: np.arange(2.0 * len(rows), dtype=np.float32).reshape(-1, 2)),
        "samples do not depend on the order of reading",
        "in any order",
    ),
    ("data source", lambda: three_clients(np.random.default_rng().random()), AGAIN, "two different"),
]
CAUGHT = (CheckFailed, ComponentFailure, UserError, ClientFailure, ValueError)


@pytest.mark.parametrize("kind", GOOD)
def test_good_components_pass(kind: str) -> None:
    for part in GOOD[kind]:
        assert all(check() for check in checks(part, kind=kind, runs=False))


def test_the_time_of_a_synthetic_round_is_that_of_its_history() -> None:
    view = world()
    assert view.clock == sum(past.seconds for past in view.history) > 0


@pytest.mark.parametrize(("kind", "part", "name", "words"), BAD, ids=[f"{row[0]}: {row[2]}" for row in BAD])
def test_a_broken_contract_is_caught_by_the_check_meant_for_it(kind: str, part: Any, name: str, words: str) -> None:
    listed = list(checks(part, kind=kind, runs=False))
    [check] = [check for check in listed if check.name == name]
    with pytest.raises(CAUGHT, match=words):
        check()
    if check is listed[0]:  # the others need valid results
        assert "FAILED" not in {result.outcome for result in perform(listed[1:])}


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_a_model_is_tried_on_the_task_and_the_data_that_its_settings_name(task: str) -> None:
    assert all(check() for check in checks(linear, {"task.kind": task}, kind="model", runs=False))
    x, y = np.ones((6, 7), np.float32), np.arange(6) % 3
    given = {"data.source": ClientArrays(x, y, y, test=(x, y)), "clients.count": 2}
    assert all(check() for check in checks(seven_features, given, kind="model", runs=False))
    with pytest.raises(ComponentFailure, match="seven features"):
        next(checks(seven_features, kind="model", runs=False))()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (bad_parts.half, ""),
        (bad_parts.by_processes, "round 2: .* number of ranks"),
        (bad_parts.Alternating, "round 2: .* number of ranks"),
        (bad_parts.from_the_start, "round 2: .* number of ranks"),
        (bad_parts.ForgetsOnResume, "no checkpoint contains"),
        (bad_parts.of_everybody, "bad_parts.py"),
        ("docs.examples.easing:Easing", ""),
        ("docs.examples.trust:Trust", ""),
        ("docs.examples.directions:directions", ""),
        ("tests.local.own_algorithms:DynamicLoss", ""),
    ],
)
def test_started_runs_catch_what_depends_on_ranks_or_is_not_saved(part: Any, words: str) -> None:
    *_, started = checks(part)
    [result] = perform([started])
    assert result.outcome == ("FAILED" if words else "ok") and re.search(words, result.remark)


def test_results_are_lines() -> None:
    results = list(perform(checks(bad_parts.negative, runs=False)))
    assert [result.outcome for result in results] == ["FAILED", "skipped", "skipped"]
    for result in results:
        assert "\n" not in str(result) and str(result).startswith(result.outcome)
        assert result.check.name in str(result)


def test_the_command_prints_one_line_per_check_and_exits_with_1_if_one_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app(["check", "tests.testing.bad_parts:root", "--quick"], standalone_mode=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("ok ") for line in lines)
    assert app(["check", "tests.testing.bad_parts:negative", "--quick"], standalone_mode=False) == 1
    options = ["--kind", "partition", "--set", "share=0.8"]
    assert app(["check", "docs.examples.partition:home_class", *options], standalone_mode=False) == 0
    assert sum(line.startswith("FAILED ") for line in capsys.readouterr().out.splitlines()) == 1
    with pytest.raises(fedmpi.UserError, match="task.loss.smoothing = -1"):
        app(["check", "label-smoothing", "--quick", "--set", "task.loss.smoothing=-1"], standalone_mode=False)


def test_options_are_given_as_keys_and_missing_ones_are_requested() -> None:
    [check, *_] = checks(bad_parts.scaled, {"task.loss.scale": 1e39}, "loss", runs=False)
    with pytest.raises(ClientFailure, match="the loss is nan"):
        check()
    for choice, kind, words in (
        ("krum", None, "server.aggregator.byzantine"),
        (bad_parts.processes, None, "kind of component"),
        (probability, "color", "no kind of component 'color'"),
    ):
        with pytest.raises(UserError, match=words):
            list(checks(choice, kind=kind))


def test_checks_that_do_not_apply_are_skipped() -> None:
    nameless = resolve("loss", lambda x, y: probability(x, y))
    mark = fedmpi.testing.parametrize_with_checks([nameless])
    for listed, skipped in ((checks(nameless), CheckSkipped), (mark.args[1], pytest.skip.Exception)):
        [started] = [check for check in listed if "rank" in check.name]
        with pytest.raises(skipped, match="top level of a file"):
            started()


def test_chances_are_those_of_the_binomial_distribution() -> None:
    third = np.full(5, 1 / 3)
    for draws, far in ((3333, 1.0), (3333 + 141, 3e-3), (3333 + 212, 7e-6), (3333 - 212, 7e-6)):
        assert far / 2 < _chance(third, draws, 10_000) < 2 * far
    assert _chance(np.ones(9_999), 9_999, 10_000) == 0, "a client that is certain to be drawn was not"
    twice = np.array([0.2] * 1000 + [0.4] * 2000)  # drawn as stated in 5,000 rounds of each kind
    assert _chance(twice, 3000, 10_000) == pytest.approx(1.0)
    assert _chance(twice * 1.1, 3000, 10_000) < 1e-5
    remark = stated_inclusion(Subject(resolve("client sampler", "uniform")))
    assert remark.startswith("12 clients, smallest chance 0.") and remark.endswith("below 8.3e-06")
