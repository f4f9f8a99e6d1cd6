"""Local steps as torch takes them: SGD's options, clipped gradients, schedules of steps.

A plain torch loop is the oracle, in float64, in the sequential and the batched engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR

from fedmpi.common.plan import Plan
from fedmpi.common.streams import Purpose
from fedmpi.config import load_config
from fedmpi.core.worker import Worker
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.optimizers import rule_of
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, schedule
from fedmpi.models.flat import FlatModel
from tests.end_to_end.in_process import run
from tests.local.synthetic import MIDDLE_IMAGES, STREAMS, InMemorySource, flat_model, made, relative_error, summed

SIZES = np.array([20, 9, 14, 20])
RULES = {
    "momentum": "local.optimizer.momentum=0.9",
    "nesterov": "local.optimizer.momentum=0.8 local.optimizer.nesterov=true local.optimizer.weight_decay=0.1",
    "weight decay": "local.optimizer.weight_decay=0.3",
    "clipped": "local.clip_norm=0.5",
    "clipped momentum": "local.clip_norm=0.5 local.optimizer.momentum=0.9 local.optimizer.weight_decay=0.1",
    "proximal": "local.batch_size=6",
    "clipped proximal momentum": "local.clip_norm=0.5 local.optimizer.momentum=0.9",
    "clipped Adam": "local.clip_norm=0.5 local.optimizer=adam",
}


def plain(
    model: FlatModel, source: InMemorySource, tasks: list[ClientTask], rule: LocalRule, round: int, weight: Any = None
) -> tuple[torch.Tensor, float]:
    """Σ coefficient · Δ by torch's own optimizers, with a weight for each class, and the sum of the batches' losses."""
    total, losses = torch.zeros_like(model.initial), 0.0
    for task in tasks:
        net = model.copy(model.initial).train()
        starts = [one.detach().clone() for one in net.parameters()]
        options = {} if rule.own is None else rule.own.part.values
        kind = torch.optim.Adam if rule.optimizer == "adam" else torch.optim.SGD
        optimizer = kind(net.parameters(), lr=rule.lr, **options)
        x, y = source.load(task.client)
        generator = STREAMS.generator(Purpose.BATCH_ORDER, round, task.client)
        for step, rows in enumerate(schedule(rule, len(y), generator)):
            if rule.rates:
                optimizer.param_groups[0]["lr"] = rule.rates[step]
            rows = slice(None) if rows is None else rows
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows], weight)
            loss.backward()
            losses += loss.item() * len(y[rows])
            if rule.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), rule.clip_norm)
            for value, first in zip(net.parameters(), starts, strict=True):
                value.grad.add_(value.detach() - first, alpha=rule.proximal_mu)
            optimizer.step()
        moved = torch.cat([one.detach().reshape(-1) for one in net.parameters()]) - model.initial
        total.add_(moved, alpha=task.coefficient)
    return total, losses


@pytest.mark.parametrize("by_step", [False, True], ids=["one rate", "rates"])
@pytest.mark.parametrize("name", [*RULES, "plain"])
def test_steps_are_those_of_torch(name: str, by_step: bool) -> None:
    config = load_config(None, ["clients.count=4", "local.batch_size=6", *RULES.get(name, "").split()])
    rule = replace(rule_of(config.local, 0.05), epochs=None, steps=5, proximal_mu=3.0 * ("proximal" in name))
    rule = replace(rule, rates=(0.01, 0.05, 0.04, 0.0, 0.02)) if by_step else rule
    model = flat_model("mlp", MIDDLE_IMAGES, torch.float64, hidden=[12])
    source = InMemorySource(MIDDLE_IMAGES, SIZES, torch.float64)
    tasks = [ClientTask(k, None, 1.0 / (k + 2)) for k in range(len(SIZES))]
    expected, _ = plain(model, source, tasks, rule, 3)
    for kind, more in ((SequentialEngine, {}), (BatchedEngine, {"chunk": 3})):
        found, _ = summed(made(kind, model, source, **more), model, tasks, rule, 3)
        assert relative_error(found, expected) < 1e-12


def test_rates_of_steps_are_those_of_torchs_schedulers() -> None:
    options = ["local.schedule=cosine", "local.schedule_unit=step", "local.warmup=7", "local.warmup_from=0.25"]
    config = load_config(None, ["clients.count=4", "rounds=4", "local.lr=0.3", *options])
    worker = Worker(config, *[None] * 6, 0.0)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    both = ChainedScheduler([CosineAnnealingLR(optimizer, 4 * 5), LinearLR(optimizer, 0.25, total_iters=7)])
    expected, found = [], []
    for round in range(4):
        plan = Plan(round, 0.3, np.arange(2), np.ones(2), 0, normalize=True)
        found += worker.at_steps(plan, rule_of(config.local, 0.3), 5).rates
        for _ in range(5):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            both.step()
    assert np.allclose(found, expected, rtol=1e-12)
    merged = worker.at_steps(plan, rule_of(config.local, 0.3), 1)  # of a client that takes one step per round
    assert merged.lr == pytest.approx(0.15 * (1 + np.cos(np.pi * 0.75)) * (0.25 + 0.75 * 3 / 7)) and not merged.rates


@pytest.mark.parametrize("late", ["lost", "partial"])
def test_rates_of_clients_that_take_fewer_steps(late: str) -> None:
    """A cohort's steps are all steps of its clients; a deadline leaves the first ones of their epochs."""
    options = ["local.schedule=cosine", "local.schedule_unit=step", "local.batch_size=6", "local.epochs=1", "rounds=4"]
    config = load_config(None, ["clients.count=4", *options, "devices.deadline=9", f"devices.late={late}"])
    worker = Worker(config, *[None] * 2, SIZES, *[None] * 2, 0.0, 0.0)  # type: ignore[arg-type]
    rule, tasks = rule_of(config.local, 0.3), [ClientTask(k, None, 1.0) for k in range(4)]
    plan = Plan(1, 0.3, np.arange(4), np.ones(4), 0, normalize=True, steps=np.array([2, 0, 3, 2]))
    places = {"lost": [[2, 3], [2, 3], [3, 4, 5], [2, 3]], "partial": [[4, 5], [2, 3], [3, 4, 5], [4, 5]]}[late]
    totals = {"lost": [8, 8, 12, 8], "partial": [16, 8, 12, 16]}[late]
    found = {task.client: own for own, group in worker.groups(plan, tasks, rule) for task in group}
    for k in range(4):
        assert found[k].rates == pytest.approx([0.15 * (1 + np.cos(np.pi * t / totals[k])) for t in places[k]])
        assert found[k].steps == (int(plan.steps[k]) or None) and found[k].epochs == (
            None if plan.steps[k] and late == "lost" else 1
        )
    opening = replace(plan, one_step=True, steps=plan.steps[:0])
    assert worker.groups(opening, tasks, rule) == [(rule, tasks)] and worker.at_steps(opening, rule, 1) is rule


def test_a_run_batches_clients_of_equal_steps_and_merges_those_of_one() -> None:
    settings = ["data.source=digits:clients=12,alpha=0.5", "model.hidden=[6]", "clients.count=8", "rounds=3"]
    settings += ["local.batch_size=60", "local.epochs=1", "local.schedule=cosine", "local.schedule_unit=step"]
    found, alone = run(*settings), run(*settings, "local.engine=sequential")
    assert "one-step clients are merged" in found.experiment.trainer.engine.description
    assert torch.allclose(found.model, alone.model, atol=1e-6)
    per_round = run(*settings[:-1])
    assert not torch.allclose(found.model, per_round.model, atol=1e-4)
    assert found.records[2]["lr"] == 0.05 and per_round.records[2]["lr"] < 0.05
