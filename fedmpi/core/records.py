"""Outputs of a run: round records, the summary, calls of the user's `on_round`, and checkpoints of all ranks."""

from __future__ import annotations

import json
import logging
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedmpi
from fedmpi.common.errors import ComponentFailure, RanksDisagree, UserError, raised
from fedmpi.common.files import writing
from fedmpi.common.imports import object_name
from fedmpi.common.plan import Plan
from fedmpi.common.registry import in_memory, resolve
from fedmpi.config.layers import remarks
from fedmpi.config.writing import flat_table
from fedmpi.core.experiment import Experiment, untrained
from fedmpi.core.placement import Balance
from fedmpi.core.reduce import RoundTotals
from fedmpi.local.pipeline import client_drift, gradient_diversity, local_gain
from fedmpi.mpi import BytesMoved, Cluster
from fedmpi.mpi.ranks import on_server
from fedmpi.records.checkpoint import Checkpoint, clients_file
from fedmpi.records.history import Record, clients_as_text, json_value
from fedmpi.records.provenance import foreign_choices, git_commit, versions
from fedmpi.records.recorder import Recorder
from fedmpi.updates.traffic import paper_formula, round_links

log = logging.getLogger("fedmpi")

OnRound = Callable[[Record], Any]


def round_record(experiment: Experiment, plan: Plan, totals: RoundTotals, model: Tensor) -> Record:
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
        **Balance.from_array(plan.balance).facts(),
        "busy_seconds": totals.busy.tolist(),
    }
    if plan.round == 0 and facts.augmentation:
        record["rebalancing"] = facts.augmentation
    if (reference := experiment.reference) is not None:
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
    if config.topology.name == "mediators":
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
    if (who := untrained(experiment.config, sizes, model.least)) and cluster.is_server:
        log.warning("%s", who)
    if (hooks := experiment.local_state.hooks) is not None:
        log.info("algorithm: %s", hooks.description)


def opening_lines(experiment: Experiment, folder: Path | None) -> list[str]:
    """Describe the run for the terminal, once everything is loaded."""
    config, sizes = experiment.config, experiment.data.sizes
    what = [f"preset {config.preset}"] if config.preset else []
    what += [f"{len(sizes):,} clients, {int(sizes.sum()):,} samples of {config.data.source.name}"]
    what += [f"{config.model.name} of {experiment.model.size:,} values", f"{config.rounds:,} rounds"]
    what += [f"into {folder}"] if folder is not None else []
    described = (
        _data_lines(experiment) if in_memory(config.data.source.choice) else []
    )  # folders were described when prepared
    return ["; ".join(what), *described, *remarks(flat_table(config))]


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
        "data": asdict(data.description),
        "engine": engine.description,
        **({"attackers": facts.attackers.tolist()} if facts.attackers.size else {}),
        **({"rebalancing": facts.augmentation} if facts.augmentation else {}),
        **({"clients_evaluated_on": view.rows.kind} if view is not None else {}),
        "versions": versions(cluster.mpi),
        "git_commit": git_commit(),
    }


class Listener:
    """Caller of `on_round` on rank 0 after every round, which sends the answer to all ranks."""

    def __init__(self, cluster: Cluster, on_round: OnRound | None):
        self.cluster = cluster
        self.on_round = on_round if cluster.is_server else None
        self.listens = bool(cluster.maximum(self.on_round is not None))

    def ends(self, record: Record | None) -> bool:
        """Check whether the run should end after this round; collective if `on_round` is set."""
        if not self.listens:
            return False
        wanted, failure, cause = False, None, None
        if self.on_round is not None and record is not None:
            try:
                wanted = bool(self.on_round(dict(json_value(record))))
            except Exception as error:
                failure, cause = _failure(self.on_round, error, record["round"]), error
        answer = json.dumps([wanted, failure]).encode() if self.cluster.is_server else b""
        (received,) = self.cluster.broadcast([np.frombuffer(answer, np.uint8)] if self.cluster.is_server else None)
        wanted, failure = json.loads(received.tobytes())
        if failure is not None:
            raise ComponentFailure(**failure) from cause
        return bool(wanted)


def _failure(on_round: OnRound, error: Exception, t: int) -> dict[str, Any]:
    """Describe the error for `ComponentFailure`: the function, its line, and its own part of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return {
        "kind": "function on_round =",
        "name": object_name(on_round),
        "problem": f"{type(error).__name__}: {error}",
        "where": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        "trace": "".join(traceback.format_list(frames)).rstrip(),
        "round": t,
    }


class SavedState:
    """Checkpoints of a run."""

    def __init__(self, experiment: Experiment, recorder: Recorder | None):
        self.config, self.cluster, self.net = experiment.config, experiment.cluster, experiment.model
        self.decisions, self.local, self.facts = experiment.decisions, experiment.local_state, experiment.data_facts
        self.optimizer, self.view = experiment.server.optimizer, experiment.view
        self.recorder = recorder
        self._moved_before = BytesMoved()

    def moved(self) -> BytesMoved:
        """Return the bytes moved by MPI since the start of the run, across resumptions; collective."""
        moved = self.cluster.share_bytes()
        moved.update(self._moved_before)
        return moved

    def check(self, model: Tensor, round: int) -> None:
        """Require the same model and algorithm vectors on all ranks; collective."""
        parts = [f"{kind} {resolve(kind, choice).name}" for kind, choice in foreign_choices(self.config)]
        check_models(self.cluster, model, round, self.local.server_vectors, parts)

    def save(self, next_round: int, model: Tensor, settled: int, unsettled: Record | None) -> None:
        """Write a checkpoint from which the run resumes at `next_round`; collective."""
        self.check(model, next_round - 1)
        tensors, header = self.gathered()
        header["mpi_bytes"] = dict(self.moved())
        if self.recorder is not None:
            self.recorder.saved()  # wait for the previous checkpoint, and tidy up the folder
        path = None if self.recorder is None else clients_file(self.recorder.checkpoints, next_round)
        with writing(self.recorder.folder) if self.recorder else nullcontext():
            header |= self.local.save_clients(path)
        if self.recorder is None:
            return
        header.update(settled=settled, unsettled=unsettled, frozen=self.net.frozen_checksum)
        self.recorder.checkpoint(next_round, {"model": model, **tensors}, header)

    def resume(self, model: Tensor) -> tuple[int, Record | None]:
        """Return the first round to run, and the record that waits for its evaluation; collective.

        If there is a checkpoint, `model` (d,) is overwritten, and every rank receives its part of the saved state.
        """
        checkpoint = on_server(self.cluster, self._found)
        try:
            first, saved = self._share(checkpoint)
            if checkpoint is not None:
                self._moved_before = BytesMoved(**checkpoint.header.get("mpi_bytes", {}))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint does not fit this run ({raised(error)}). Resume with the version of fedmpi that wrote "
                "it, or choose another --out"
            ) from error
        kept = None
        if checkpoint is not None and self.recorder is not None and checkpoint.header.get("clients"):
            kept = clients_file(self.recorder.checkpoints, first)
        self.local.load_clients(kept, self.recorder.folder if self.recorder else None)
        if saved is not None:
            model.copy_(saved)
        return first, None if checkpoint is None else checkpoint.header.get("unsettled")

    def _found(self) -> Checkpoint | None:
        """Return the checkpoint of the run's folder that the run resumes from, on rank 0 only."""
        if self.recorder is None:
            return None
        found = self.recorder.resume(self.facts.digest)
        own = self.net.frozen_checksum
        if found is not None and found.header.get("frozen", own) != own:
            raise UserError(
                f"the model's frozen parameters differ from those that {self.recorder.folder} was trained with. "
                "Build the same model again, or choose another --out"
            )
        return found

    def gathered(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gather the checkpoint's tensors and header, without the model; collective, complete on rank 0."""
        moments = {f"server.{name}": value for name, value in self.optimizer.state().items()}
        decided, seen = self.decisions.state(), {} if self.view is None else self.view.state()
        return {**moments, **decided, **seen, **self.local.gathered()}, {"data": self.facts.digest}

    def _share(self, checkpoint: Checkpoint | None) -> tuple[int, Tensor | None]:
        """Send rank 0's checkpoint to every rank; return the first round and the model, if there is one."""
        names = ["model", *(f"server.{name}" for name in self.optimizer.names), *self.local.names]
        arrays = None
        if self.cluster.is_server:
            saved = checkpoint.tensors if checkpoint else {}
            first = np.array([checkpoint.next_round if checkpoint else 0], np.int64)
            arrays = [first, *(saved[n].numpy() if n in saved else np.empty(0, np.float32) for n in names)]
        received = self.cluster.broadcast(arrays)
        initial = self.net.initial
        named = zip(names, received[1:], strict=True)
        tensors = {name: torch.tensor(array, device=initial.device) for name, array in named if array.size}
        self._check_lengths(tensors)
        moments = {name.removeprefix("server."): t for name, t in tensors.items() if name.startswith("server.")}
        self.optimizer.load(moments, int(received[0][0]))
        self.local.load(tensors)
        if checkpoint is not None and self.view is not None:
            self.view.load(checkpoint.tensors)
        self.decisions.load(checkpoint.tensors if checkpoint else None, resumed=int(received[0][0]) > 0)
        return int(received[0][0]), tensors.get("model")

    def _check_lengths(self, tensors: dict[str, Tensor]) -> None:
        """Raise ValueError if a vector of the server is not as long as the model, or the model is not finite."""
        model = self.net
        shape = model.initial.shape
        for name, tensor in tensors.items():
            if name == "model" and (tensor.shape != shape or not bool(tensor.isfinite().all())):
                raise ValueError(f"its model has the shape {tuple(tensor.shape)}, not {tuple(shape)}")
            if name.startswith("server.") and tensor.dim() and tensor.numel() not in (model.trainable, model.size):
                raise ValueError(f"{name} has {tensor.numel()} values, the model {model.size}")


def check_models(
    cluster: Cluster, model: Tensor, round: int, further: Sequence[Tensor] = (), parts: Sequence[str] = ()
) -> None:
    """Require the same model, and the same further server vectors, on all ranks after a round; collective."""
    checksum = zlib.crc32(model.cpu().numpy().data)
    for vector in further:
        checksum = zlib.crc32(vector.cpu().numpy().data, checksum)
    own = np.array([checksum], np.int64)
    gathered = cluster.gather(own)
    checksums = cluster.broadcast([np.concatenate(gathered)] if gathered is not None else None)[0]
    others = np.flatnonzero(checksums != checksums[0]).tolist()
    if others:
        asked = f"does a custom component ({', '.join(parts)}) give different results on different ranks, or "
        raise RanksDisagree(
            f"the models of ranks {others} differ from that of rank 0 after round {round}; "
            f"{asked if parts else ''}do the CPUs or torch versions of the nodes differ?"
        )
