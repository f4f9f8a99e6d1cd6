"""Outputs of a run: round records, the summary, and calls of the user's `on_round`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedmpi
from fedmpi.common.calling import failure_of, takes
from fedmpi.common.errors import ComponentFailure, raised
from fedmpi.common.plan import Plan
from fedmpi.common.registry import Component, in_memory
from fedmpi.config.loading import remarks
from fedmpi.config.writing import flat_table
from fedmpi.core.experiment import Experiment
from fedmpi.core.reduce import RoundTotals
from fedmpi.local.observer import client_drift, gradient_diversity, local_gain
from fedmpi.mpi import Cluster
from fedmpi.mpi.ranks import on_server
from fedmpi.records.history import Record, clients_as_text, json_value
from fedmpi.records.provenance import git_commit, versions
from fedmpi.updates.traffic import paper_formula, round_links

log = logging.getLogger("fedmpi")

OnRound = Callable[..., Any]
"""Function of a record and, if it has this parameter, the `model` after the round."""


def round_record(experiment: Experiment, plan: Plan, totals: RoundTotals) -> Record:
    """Return the record of a round, without its evaluation."""
    sums, facts = totals.sums, experiment.data_facts
    record = {
        "round": plan.round,
        "lr": plan.lr,
        "train_loss": sums["loss_sum"] / sums["loss_count"] if sums["loss_count"] else None,
        "samples": round(sums["samples"]),
        "steps": round(sums["steps"]),
        **plan.facts,
        **({"clients": clients_as_text(plan.clients)} if experiment.config.logging.participants else {}),
        **_links(experiment, plan, totals),
        **_observed(experiment, plan, totals),
        **({"attackers": int(np.isin(plan.clients, facts.attackers).sum())} if facts.attackers.size else {}),
        **({"worker_speeds": plan.speeds.tolist()} if plan.speeds.size else {}),
        "busy_seconds": totals.busy.tolist(),
    }
    if plan.round == 0 and facts.augmentation:
        record["rebalancing"] = facts.augmentation
    return {key: value for key, value in record.items() if value is not None}


def _links(experiment: Experiment, plan: Plan, totals: RoundTotals) -> dict[str, int]:
    config, model, data = experiment.config, experiment.model, experiment.data
    clients, classes, visits = len(data.sizes), data.description.classes, round(totals.sums["visits"])
    decisions = experiment.decisions
    links = round_links(config, model, clients, classes, plan, decisions.stratifier.measured, visits)
    if decisions.planner.turnout is not None:
        links += decisions.cohorts.links(decisions.planner.turnout)
    counted = {f"bytes_{link}": count for link, count in vars(links).items() if count}
    return counted | {"bytes_paper_formula": paper_formula(config, model.size, len(plan.clients))}


def _observed(experiment: Experiment, plan: Plan, totals: RoundTotals) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    config, server = experiment.config, experiment.server
    hooks, returned = experiment.trainer.hooks, round(totals.sums["clients"])
    if hooks is not None and returned:
        facts |= {f"local_{name}": totals.further[name] / returned for name in hooks.returned}
    if copies := experiment.model.copies:
        facts["copies"] = [round(totals.further[f"copy {copy} clients"]) for copy in range(copies)]
    if config.topology.name == "mediators":
        facts["visits"] = round(totals.sums["visits"])
        facts["hops"] = round(totals.sums["hops"])
        facts["idle_seconds"] = totals.idle.tolist()
    if server.clipping is not None:
        facts["clipped_updates"] = round(totals.sums["clipped"])
        facts |= {"clip_norm": server.clipping.used} if server.clipping.adaptive else {}
    if config.logging.diagnostics:
        norm = float(torch.linalg.vector_norm(totals.update, dtype=torch.float64))
        facts["update_norm"] = norm / server.divisor(plan, totals)
        if not server.combines:  # both compare the updates with their weighted mean
            facts["gradient_diversity"] = gradient_diversity(totals.moments, norm)
            facts["client_drift"] = client_drift(totals.moments, norm)
        facts["gamma"] = local_gain(totals.moments)
    return facts


def log_setup(experiment: Experiment) -> None:
    """Write the setup of the run to its log, with the reason for the engine."""
    cluster, model, sizes = experiment.cluster, experiment.model, experiment.data.sizes
    initial, engine = model.initial, experiment.trainer.engine
    log.info("fedmpi %s, torch %s, MPI %s", fedmpi.__version__, torch.__version__, cluster.mpi)
    log.info("%d ranks on %d nodes, device %s", cluster.size, cluster.nodes, initial.device)
    log.info("%d clients, %d samples, model of %d values", len(sizes), sizes.sum(), model.size)
    for line in _data_lines(experiment):
        log.info("data: %s", line)
    log.info("placement: %s", experiment.layout.description)
    for remark in remarks(flat_table(experiment.config)):
        log.info("%s", remark)
    log.info("engine: %s", engine.description)
    if (observer := experiment.trainer.observer) is not None and observer.numbers.widths:
        needed, vectors = observer.numbers.memory(len(sizes))
        log.info("memory: %.1f MB for %s on rank 0", needed / 1e6, vectors)
    if (stratifier := experiment.decisions.stratifier).wanted:
        log.info("strata: %s", stratifier.transform.description)
    if (
        model.least > 1
        and cluster.is_server
        and ((sizes == 1).any() or not experiment.trainer.worker.row_rule.uses_all)
    ):
        log.warning("A client does not train in a round in which it has one sample: the model needs batches of two")
    if (hooks := experiment.trainer.hooks) is not None:
        log.info("algorithm: %s", hooks.description)


def opening_lines(experiment: Experiment, folder: Path | None) -> list[str]:
    """Describe the run for the terminal, once everything is loaded."""
    config, sizes = experiment.config, experiment.data.sizes
    what = [f"preset {config.preset}"] if config.preset else []
    what += [f"{len(sizes):,} clients, {int(sizes.sum()):,} samples of {config.data.source.name}"]
    what += [f"{config.model.name} with {experiment.model.size:,} parameters", f"{config.rounds:,} rounds"]
    what += [f"output: {folder}"] if folder is not None else []
    if in_memory(config.data.source.choice):  # folders were described when prepared
        return ["; ".join(what), *_data_lines(experiment), *remarks(flat_table(config))]
    return ["; ".join(what), *remarks(flat_table(config))]


def _data_lines(experiment: Experiment) -> list[str]:
    """Describe the data, with the notes on them."""
    manifest = experiment.data.store.manifest
    facts = (*manifest.facts(), ("samples", manifest.parts), *(("note", note) for note in manifest.notes))
    return [f"{name}: {what}" for name, what in facts]


def summary_facts(experiment: Experiment) -> Record:
    """Return the summary entries on the environment of the run."""
    facts, view, data = experiment.data_facts, experiment.view, experiment.data
    cluster, engine = experiment.cluster, experiment.trainer.engine
    return {
        "ranks": cluster.size,
        "clients": len(data.sizes),
        "parameters": experiment.model.trainable,
        **({"personal_values": experiment.model.personal} if experiment.model.personal else {}),
        "data": asdict(data.description),
        "engine": engine.description,
        **({"clients_at_once": experiment.model.clients_at_once} if experiment.model.clients_at_once else {}),
        **({"attackers": facts.attackers.tolist()} if facts.attackers.size else {}),
        **({"rebalancing": facts.augmentation} if facts.augmentation else {}),
        **({"clients_evaluated_on": view.rows.kind} if view is not None else {}),
        "versions": versions(cluster.mpi),
        "git_commit": git_commit(),
    }


class Listener:
    """Caller of `on_round` on rank 0 after every round; sends all ranks its answer, or the end of the patience."""

    def __init__(self, cluster: Cluster, on_round: OnRound | None, patient: bool):
        self.cluster = cluster
        self.on_round = on_round if cluster.is_server else None
        self.listens = patient or bool(cluster.maximum(self.on_round is not None))
        self.part = Component("function on_round =", on_round, key="on_round")
        self.named = on_server(cluster, self._named) if self.listens else None

    def _named(self) -> set[str]:
        return takes(self.part, self.on_round, "record", offered=("model",)) if self.on_round is not None else set()

    def ends(self, record: Record | None, model: Callable[[], nn.Module], exhausted: bool) -> bool:
        """Check whether the run should end after this round; collective."""
        wanted, failure, cause = exhausted, None, None
        if self.on_round is not None and record is not None:
            try:
                more = {"model": model()} if self.named else {}
                wanted |= bool(self.on_round(dict(json_value(record)), **more))
            except Exception as error:
                failure, cause = vars(failure_of(self.part, error, raised(error), record["round"])), error
        answer = json.dumps([wanted, failure]).encode() if self.cluster.is_server else b""
        (received,) = self.cluster.broadcast([np.frombuffer(answer, np.uint8)] if self.cluster.is_server else None)
        wanted, failure = json.loads(received.tobytes())
        if failure is not None:
            raise ComponentFailure(**failure) from cause
        return bool(wanted)
