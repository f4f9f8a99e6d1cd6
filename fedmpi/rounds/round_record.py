"""What is recorded: a round, by its plan and its sums; a run, by what it was made with."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedmpi
from fedmpi.common.data_choices import in_memory
from fedmpi.common.plan import Plan
from fedmpi.config.base import written
from fedmpi.config.layers import remarks
from fedmpi.config.writing import flat_table
from fedmpi.local.diagnostics import client_drift, gradient_diversity, local_gain
from fedmpi.records.history import Record, clients_as_text
from fedmpi.records.provenance import git_commit, versions
from fedmpi.rounds.assemble import Experiment
from fedmpi.rounds.balance import Balance
from fedmpi.rounds.round_sum import RoundTotals
from fedmpi.rounds.small_batches import untrained
from fedmpi.rounds.traffic_count import paper_formula, round_links

log = logging.getLogger("fedmpi")


def round_record(experiment: Experiment, plan: Plan, totals: RoundTotals, model: Tensor) -> Record:
    """The round's record, without what evaluation adds."""
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
        **Balance.from_array(plan.balance).facts(),
        "busy_seconds": totals.busy.tolist(),
    }
    if plan.round == 0 and facts.augmentation:
        record["rebalancing"] = facts.augmentation
    if (reference := experiment.evaluation.reference) is not None:
        record["weight_divergence"] = reference.distance(model)
    return {key: value for key, value in record.items() if value is not None}


def _links(experiment: Experiment, plan: Plan, totals: RoundTotals) -> dict[str, int]:
    config, model, data = experiment.config, experiment.model, experiment.data
    clients, classes, visits = len(data.sizes), data.description.classes, round(totals.sums["visits"])
    links = round_links(config, model, clients, classes, plan, experiment.decisions.measured, visits)
    counted = {f"bytes_{link}": count for link, count in vars(links).items() if count}
    return counted | {"bytes_paper_formula": paper_formula(config, model.size, len(plan.clients))}


def _observed(experiment: Experiment, plan: Plan, totals: RoundTotals) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    config, server = experiment.config, experiment.server
    hooks, returned = experiment.local_state.hooks, round(totals.sums["clients"])
    if hooks is not None and returned:
        facts |= {f"local_{name}": totals.further[name] / returned for name in hooks.numbers}
    if config.topology.kind == "mediators":
        facts["visits"] = round(totals.sums["visits"])
        facts["hops"] = round(totals.sums["hops"])
        facts["idle_seconds"] = totals.idle.tolist()
    if config.privacy.clip_norm is not None:
        facts["clipped_updates"] = round(totals.sums["clipped"])
    if config.local.on_divergence == "drop":
        facts["diverged"] = round(totals.sums["diverged"])
    if config.logging.diagnostics:
        norm = float(torch.linalg.vector_norm(totals.update, dtype=torch.float64))
        facts["update_norm"] = norm / server.divisor(plan, totals)
        if not server.combines:  # both compare the updates with their weighted mean
            facts["gradient_diversity"] = gradient_diversity(totals.moments, norm)
            facts["client_drift"] = client_drift(totals.moments, norm)
        facts["gamma"] = local_gain(totals.moments)
    return facts


def log_setup(experiment: Experiment) -> None:
    """Say in the run log what runs where, and why this engine."""
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
    if (who := untrained(experiment.config, sizes, model.least)) and cluster.is_server:
        log.warning("%s", who)
    if (hooks := experiment.local_state.hooks) is not None:
        log.info("algorithm: %s", hooks.description)


def opening_lines(experiment: Experiment, folder: Path | None) -> list[str]:
    """What a run is, for the terminal, once everything is loaded."""
    config, sizes = experiment.config, experiment.data.sizes
    what = [f"preset {config.preset}"] if config.preset else []
    what += [f"{len(sizes):,} clients, {int(sizes.sum()):,} samples of {written(config.data.shards)}"]
    what += [f"{written(config.model.name)} of {experiment.model.size:,} values", f"{config.rounds:,} rounds"]
    what += [f"into {folder}"] if folder is not None else []
    described = _data_lines(experiment) if in_memory(config.data.shards) else []  # folders were, when prepared
    return ["; ".join(what), *described, *remarks(flat_table(config))]


def _data_lines(experiment: Experiment) -> list[str]:
    """What the data are, and the notes on them."""
    manifest = experiment.data.store.manifest
    facts = (*manifest.facts(), ("samples", manifest.parts), *(("note", note) for note in manifest.notes))
    return [f"{name}: {what}" for name, what in facts]


def summary_facts(experiment: Experiment) -> Record:
    """What the summary says about where and with what the run was made."""
    facts, view, data = experiment.data_facts, experiment.evaluation.clients, experiment.data
    cluster, engine = experiment.cluster, experiment.trainer.engine
    return {
        "ranks": cluster.size,
        "clients": len(data.sizes),
        "parameters": experiment.model.trainable,
        "data": asdict(data.description),
        "engine": engine.description,
        **({"attackers": facts.attackers.tolist()} if facts.attackers.size else {}),
        **({"rebalancing": facts.augmentation} if facts.augmentation else {}),
        **({"clients_evaluated_on": view.rows.kind} if view is not None else {}),
        "versions": versions(cluster.mpi),
        "git_commit": git_commit(),
    }
