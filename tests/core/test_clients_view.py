"""Per-client evaluation: the numbers are those of a plain loop on any rank and after any stop."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import ClientArrays, UserError
from fedmpi.common.fairness import SPREADS
from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import KINDS
from fedmpi.records.tables import CLIENTS, Columns, drop_tables_after, read_table, write_tables
from fedmpi.tasks.evaluation import JUDGED, LOSS, RIGHT, WEIGHT, client_sums, cut, evaluate, has_accuracy
from fedmpi.tasks.losses import task_loss
from fedmpi.tasks.metrics import Metric
from tests.end_to_end.in_process import run_into

SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients.count": 4,
    "model.hidden": [6],
    "local.engine": "sequential",
    "logging.tensorboard": False,
    "cluster.threads": 1,
    "checkpoint.every": 0,
    "evaluation.clients": "all",
}
SIZES = (7, 0, 30, 1, 55, 12, 3, 41)


def arrays(held_out: tuple[int, ...] | None = None) -> ClientArrays:
    """Clients of `SIZES` samples of two features, the second without any; some with samples held out."""
    generator = np.random.default_rng(5)

    def drawn(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        owner = np.repeat(np.arange(len(sizes)), sizes)
        y = (owner + generator.integers(0, 2, len(owner))) % 3
        x = generator.standard_normal((len(owner), 2)) + np.stack([np.cos(y), np.sin(y)], 1)
        return x.astype(np.float32), y, owner

    x, y, owner = drawn(SIZES)
    held = None if held_out is None else drawn(held_out)
    return ClientArrays(x, y, owner, test=(x[:9], y[:9]), val=held, clients=len(SIZES))


def by_hand(module: nn.Module, rows: dict[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, tuple[float, float]]:
    """Return mean loss and accuracy of each client, sequentially in float64."""
    exact, found = copy.deepcopy(module).double().eval(), {}
    for client, (x, y) in rows.items():
        outputs = exact(torch.tensor(x).double()).detach().numpy()
        log_probability = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
        losses = [-log_probability[i, label] for i, label in enumerate(y)]
        right = [outputs[i].argmax() == label for i, label in enumerate(y)]
        found[client] = math.fsum(losses) / len(y), sum(right) / len(y)
    return found


def rows_of(data: ClientArrays, held_out: bool = False) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    (x, y), offsets = (data.val, data.val_offsets) if held_out else ((data.x, data.y), data.offsets)
    pairs = {k: (x[a:b], y[a:b]) for k, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False))}
    return {client: pair for client, pair in pairs.items() if len(pair[1])}


def assert_scores(table: Columns, expected: dict[int, tuple[float, float]]) -> None:
    assert table["client"].tolist() == sorted(expected)
    for client, loss, accuracy in zip(table["client"], table["loss"], table["accuracy"], strict=True):
        assert loss == pytest.approx(expected[client][0], rel=1e-5)
        assert accuracy == expected[client][1]


@pytest.mark.parametrize("at_once", [1, 8, 2000])
@pytest.mark.parametrize("held_out", [None, (3, 2, 0, 1, 4, 0, 9, 6)])
def test_scores_are_those_of_a_plain_loop_over_clients(held_out: tuple[int, ...] | None, at_once: int):
    data = arrays(held_out)
    done = fedmpi.run("fedavg", SMALL | {"evaluation.batch_size": at_once}, data=data)
    table = done.clients
    assert_scores(table, by_hand(done.model, rows_of(data, held_out is not None)))
    assert table["samples"].tolist() == [n for n in held_out or SIZES if n]
    assert table["training_samples"].tolist() == [SIZES[k] for k in table["client"]]
    assert set(table["round"]) == {1}
    assert done.summary["clients_evaluated_on"] == ("training rows" if held_out is None else "held-out rows")
    assert done.summary["final"]["client_accuracy_mean"] == pytest.approx(table["accuracy"].mean())


def test_a_record_reports_how_they_spread_and_a_phase_what_it_cost():
    done = fedmpi.run("fedavg", SMALL | {"rounds": 5, "evaluation.clients_every": 2}, data=arrays())
    for record in done.records:
        due = record["round"] in (1, 3, 4)
        assert due == ("clients" in record["phase_seconds"]) == ("client_loss_jain" in record)
        if not due:
            continue
        seen = {k: v[done.clients["round"] == record["round"]] for k, v in done.clients.items()}
        weights = seen["samples"] / seen["samples"].sum()
        assert len(seen["client"]) == 7
        assert record["client_accuracy_weighted"] == pytest.approx((seen["accuracy"] * weights).sum())
        assert record["client_accuracy_worst10"] == seen["accuracy"].min()
        assert record["client_accuracy_best10"] == seen["accuracy"].max()
        assert record["client_accuracy_std"] == pytest.approx(seen["accuracy"].std())
        assert record["client_loss_worst10"] == seen["loss"].max()
        assert record["client_loss_best10"] == seen["loss"].min()
        assert record["phase_seconds"]["clients"] <= record["seconds"]
    assert {f"client_accuracy_{name}" for name in SPREADS} <= done.records[-1].keys()


def test_how_often_they_were_used():
    data = arrays()
    done = fedmpi.run(
        "fedavg", SMALL | {"rounds": 2, "evaluation.clients_every": 1, "logging.participants": True}, data=data
    )
    used = np.zeros(len(SIZES), int)
    for record in done.records:
        for part in record["clients"].split():
            first, _, last = part.partition("-")
            used[int(first) : int(last or first) + 1] += 1
        seen = {k: v[done.clients["round"] == record["round"]] for k, v in done.clients.items()}
        assert seen["times_used"].tolist() == used[seen["client"]].tolist()


def test_parts_follow_from_the_clients_alone_and_hold_as_many_rows_as_go():
    assert cut(np.array([3, 3, 3, 10, 1, 1]), 6).tolist() == [0, 2, 3, 4, 6]
    assert cut(np.array([], int), 6).tolist() == [0]
    counts = np.random.default_rng(0).integers(1, 50, 500)
    borders = cut(counts, 100)
    rows = np.add.reduceat(counts, borders[:-1])
    assert rows.sum() == counts.sum() and rows.max() <= 100
    assert (rows[:-1] + counts[borders[1:-1]] > 100).all()


def test_a_number_of_clients_is_drawn_once_by_the_seed():
    panels = set()
    for seed in (0, 1, 2):
        settings = SMALL | {"evaluation.clients": 4, "evaluation.clients_every": 1, "seed": seed}
        table = fedmpi.run("fedavg", settings, data=arrays()).clients
        first, second = (table["client"][table["round"] == t].tolist() for t in range(2))
        assert first == second == sorted(set(first)) and len(first) == 4 and 1 not in first  # it holds no samples
        panels.add(tuple(first))
    assert len(panels) > 1


@pytest.mark.parametrize("value", ["most", 0, 8])
def test_what_cannot_be_evaluated_is_rejected(value: Any):
    with pytest.raises(UserError, match=r"evaluation\.clients"):
        fedmpi.run("fedavg", SMALL | {"evaluation.clients": value}, data=arrays())


def test_fine_tuned_models_are_those_of_a_plain_loop_and_nothing_flows_back():
    data, held_out = arrays((3, 0, 2, 1, 4, 5, 9, 6)), rows_of(arrays((3, 0, 2, 1, 4, 5, 9, 6)), held_out=True)
    settings = SMALL | {"local.batch_size": "all", "local.lr": 0.3, "local.epochs": 1, "rounds": 3}
    without = fedmpi.run("fedavg", {k: v for k, v in settings.items() if k != "evaluation.clients"}, data=data)
    done = fedmpi.run("fedavg", settings | {"evaluation.fine_tune": 3, "evaluation.clients_every": 1}, data=data)
    for name, value in without.model.state_dict().items():
        assert torch.equal(value, done.model.state_dict()[name])
    assert [r["test_loss"] for r in without.records] == [r["test_loss"] for r in done.records]
    last = done.clients["round"] == done.clients["round"].max()
    table, own = {name: column[last] for name, column in done.clients.items()}, rows_of(data)
    for place, client in enumerate(table["client"]):
        module = copy.deepcopy(done.model).double()
        x, y = (torch.tensor(array) for array in own[client])
        for _ in range(3):  # epochs of one step on all rows
            loss = nn.functional.cross_entropy(module(x.double()), y)
            for parameter, gradient in zip(
                module.parameters(), torch.autograd.grad(loss, [*module.parameters()]), strict=True
            ):
                parameter.data -= 0.3 * gradient
        expected = by_hand(module, {client: held_out[client]})[client]
        assert table["tuned_loss"][place] == pytest.approx(expected[0], rel=1e-4)
        assert table["tuned_accuracy"][place] == expected[1]
    last = done.records[-1]
    assert last["client_tuned_accuracy_mean"] == pytest.approx(table["tuned_accuracy"].mean())
    assert last["client_tuned_loss_worst10"] == pytest.approx(table["tuned_loss"].max())
    assert last["phase_seconds"].keys() >= {"clients", "fine_tune"}


@pytest.mark.parametrize("more", [{"evaluation.fine_tune": 2}, {"evaluation.fine_tune": 1, "local.batch_size": "all"}])
def test_fine_tuning_that_diverges_ends_the_run(more: dict[str, Any]):
    """A client may also diverge in its last step, after which no loss is seen any more."""
    settings = SMALL | {"rounds": 1, "local.lr": 1e20, "clients.count": 1} | more
    with pytest.raises(fedmpi.ClientFailure, match="Training diverged"):
        fedmpi.run("fedavg", settings, data=arrays())


@pytest.mark.parametrize("kind", ["classification", "tokens", "multilabel", "regression"])
def test_every_kind_of_task_has_the_scores_that_its_metrics_give_client_by_client(kind: str):
    counts, generator = np.array([3, 1, 5]), torch.Generator().manual_seed(0)
    x = torch.randn(9, 4, generator=generator)
    shape = {"tokens": (4, 3), "regression": (1,)}.get(kind, (3,))
    module = nn.Sequential(nn.Linear(4, math.prod(shape)), nn.Unflatten(1, shape))
    y = {
        "classification": torch.randint(0, 3, (9,), generator=generator),
        "tokens": torch.randint(-1, 3, (9, 4), generator=generator),
        "multilabel": torch.randint(0, 2, (9, 3), generator=generator).float(),
        "regression": torch.randn(9, generator=generator),
    }[kind]
    y = torch.cat([y[:3], torch.full_like(y[3:4], -1), y[4:]]) if kind == "tokens" else y
    loss = task_loss(KINDS[kind].loss, kind=kind)
    accuracy = Metric(resolve("metric", "accuracy"))
    sums = client_sums(module, x, y, counts, loss, rows=4)
    assert sums[:, WEIGHT].tolist() == counts.tolist()
    for client, (first, last) in enumerate([(0, 3), (3, 4), (4, 9)]):
        some, targets = x[first:last], y[first:last]
        judged = has_accuracy(KINDS[kind]) and not (kind == "tokens" and client == 1)
        alone = evaluate(module, some, targets, 100, loss, [accuracy] if judged else [])
        assert sums[client, LOSS] / counts[client] == pytest.approx(alone.loss, rel=1e-5)
        assert judged or sums[client, JUDGED] == 0  # no position counts, or none can be right
        if judged:
            assert sums[client, RIGHT] / sums[client, JUDGED] == pytest.approx(alone.numbers["accuracy"])
    assert has_accuracy(KINDS[kind]) == (kind != "regression")


VIEWED = (
    *("preset=fedavg", "rounds=8", "clients.count=4", "model.hidden=[6]", "local.engine=sequential"),
    *("evaluation.clients=all", "evaluation.clients_every=1", "checkpoint.every=3"),
)


def test_a_stopped_run_continues_with_its_rows_and_misses_those_that_are_gone(tmp_path: Path):
    whole, run = tmp_path / "WHOLE", tmp_path / "RUN"
    assert run_into(whole, *VIEWED) == 0
    assert run_into(run, *VIEWED, stop_after=5) == 75
    assert np.unique(read_table(run)["round"]).tolist() == [0, 1, 2, 3, 4]
    path = max((run / "clients.parquet").iterdir())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"clients\..* cannot be read .*damaged"):
        read_table(run)
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot change .evaluation.clients: "):
        run_into(run, *VIEWED, "evaluation.clients=participants", resume=True)
    assert run_into(run, *VIEWED, resume=True) == 0
    one, other, loaded = read_table(whole), read_table(run), fedmpi.load_run(run).clients
    assert one.keys() == other.keys() == loaded.keys()
    assert all(np.array_equal(one[name], other[name]) and np.array_equal(one[name], loaded[name]) for name in one)


def test_a_table_holds_the_rows_up_to_a_checkpoint(tmp_path: Path):
    written = {3: [0.5, np.nan], 4: [0.25], 6: [1.0]}
    for checkpoint, losses in written.items():
        rows = {"client": np.arange(len(losses)), "loss": np.array(losses)}
        write_tables(tmp_path, {CLIENTS: rows}, checkpoint)
    for checkpoint in (6, 4, 0):
        drop_tables_after(tmp_path, checkpoint)
        rows = [loss for name, losses in written.items() if name <= checkpoint for loss in losses]
        found = read_table(tmp_path)
        assert np.array_equal(found.get("loss", []), rows, equal_nan=True)
