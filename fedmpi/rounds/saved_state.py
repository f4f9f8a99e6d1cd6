"""What a run needs to go on, held by all ranks: gathered into checkpoints, and given back to all when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.cluster import BytesMoved
from fedmpi.cluster.on_server import on_server
from fedmpi.common.errors import UserError, raised
from fedmpi.common.files import writing
from fedmpi.common.registry import resolve
from fedmpi.records.checkpoint import Checkpoint, clients_file
from fedmpi.records.history import Record
from fedmpi.records.provenance import foreign_choices
from fedmpi.records.recorder import Recorder
from fedmpi.rounds.agreement import check_models
from fedmpi.rounds.assemble import Experiment


class SavedState:
    """The checkpoints of a run."""

    def __init__(self, experiment: Experiment, recorder: Recorder | None):
        self.config, self.cluster, self.net = experiment.config, experiment.cluster, experiment.model
        self.decisions, self.local, self.facts = experiment.decisions, experiment.local_state, experiment.data_facts
        self.optimizer, self.view = experiment.server.optimizer, experiment.evaluation.clients
        self.watch = self.facts.watch
        self.recorder = recorder
        self._moved_before = BytesMoved()

    def moved(self) -> BytesMoved:
        """What MPI has moved since the run began, up to the last checkpoint of each of its parts; collective."""
        return self._moved_before + self.cluster.share_bytes()

    def check(self, model: Tensor, round: int) -> None:
        """The data must be as they were, and all ranks hold the same model and vectors of the algorithm; collective."""
        self.watch.check()
        parts = [f"{kind} {resolve(kind, choice).name}" for kind, choice in foreign_choices(self.config)]
        check_models(self.cluster, model, round, self.local.server_vectors, parts)

    def save(self, next_round: int, model: Tensor, settled: int, unsettled: Record | None) -> None:
        """Write a checkpoint from which the run goes on at `next_round`; collective."""
        self.check(model, next_round - 1)
        tensors, header = self.gathered()
        header["mpi_bytes"] = asdict(self.moved())
        if self.recorder is not None:
            self.recorder.saved()  # the one before, which also tidies up the folder
        path = None if self.recorder is None else clients_file(self.recorder.checkpoints, next_round)
        with writing(self.recorder.folder) if self.recorder else nullcontext():
            header |= self.local.save_clients(path)
        if self.recorder is None:
            return
        header.update(settled=settled, unsettled=unsettled, frozen=self.net.frozen_checksum)
        self.recorder.checkpoint(next_round, {"model": model, **tensors}, header)

    def resume(self, model: Tensor) -> tuple[int, Record | None]:
        """The first round to run, and the record that waits for its evaluation; collective.

        Where there is a checkpoint, `model` (d,) is overwritten, and every rank receives its part of the saved state.
        """
        checkpoint = on_server(self.cluster, lambda: self._found())
        with self._fitting():
            first, saved = self.share(checkpoint)
            if checkpoint is not None:
                self._moved_before = BytesMoved(**checkpoint.header.get("mpi_bytes", {}))
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
                f"the model's frozen values are others than those that {self.recorder.folder} was trained with: "
                "build it as it was, or choose another --out"
            )
        return found

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Within: a checkpoint whose vectors are of other lengths or types than those of this run is refused."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint does not fit this run ({raised(error)}): resume with the version of fedmpi that wrote "
                "it, or choose another --out"
            ) from error

    def gathered(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint must hold besides the model: tensors by name and a header; collective, whole on rank 0."""
        moments = {f"server.{name}": value for name, value in self.optimizer.state().items()}
        decided, seen = self.decisions.state(), {} if self.view is None else self.view.state()
        return {**moments, **decided, **seen, **self.local.gathered()}, {"data": self.facts.digest}

    def share(self, checkpoint: Checkpoint | None) -> tuple[int, Tensor | None]:
        """Give rank 0's checkpoint to every rank; returns the first round and the model, if there is one."""
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
        """Raise ValueError where a vector of the server is not as long as the model, or the model is not finite."""
        model = self.net
        shape = model.initial.shape
        for name, tensor in tensors.items():
            if name == "model" and (tensor.shape != shape or not bool(tensor.isfinite().all())):
                raise ValueError(f"its model has the shape {tuple(tensor.shape)}, not {tuple(shape)}")
            if name.startswith("server.") and tensor.dim() and tensor.numel() not in (model.trainable, model.size):
                raise ValueError(f"{name} has {tensor.numel()} values, the model {model.size}")
