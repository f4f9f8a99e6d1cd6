"""State of a run between rounds: everything that a checkpoint holds, and how all ranks get it back."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.errors import RanksDisagree, UserError, raised
from fedmpi.common.files import writing
from fedmpi.core.experiment import Experiment
from fedmpi.mpi import BytesMoved
from fedmpi.mpi.ranks import on_server
from fedmpi.records.checkpoint import Checkpoint, clients_file, load_records, model_file, save_records
from fedmpi.records.history import BestRound, Record
from fedmpi.records.provenance import custom_components
from fedmpi.records.recorder import Recorder
from fedmpi.updates.compression import RESIDUALS

log = logging.getLogger("fedmpi")


class SavedState:
    """Checkpoints of a run, and the model of its best round.

    Tensors: the model; that of the best round so far; the moments of the server optimizer; the server's vectors of the
    local algorithm; the models and clients in flight of asynchronous rounds; the strata, the accounts, the workers'
    speeds and the sampler's numbers (`Decisions`); the state of sampler, weights and aggregator; integer buffers of the
    model; how often clients were selected; and the residuals of compression. Clients' vectors of the local algorithm
    and their personal values are in a separate file.
    """

    def __init__(self, experiment: Experiment, recorder: Recorder | None):
        self.experiment, self.recorder = experiment, recorder
        self.config, self.cluster, self.net = experiment.config, experiment.cluster, experiment.model
        self.decisions, self.optimizer, self.view = experiment.decisions, experiment.server.optimizer, experiment.view
        self.hooks, self.homes = experiment.trainer.hooks, experiment.trainer.homes
        observer = experiment.trainer.observer
        self.transport = observer.transport if observer is not None else None
        self._moved_before = BytesMoved()
        self.best = BestRound(self.config)
        self._best_model: dict[str, Tensor] = {}  # its values (d,) and integer buffers, on rank 0
        self._best_written = False

    def note(self, record: Record, model: Tensor) -> None:
        """Keep a copy of the model (d,) after an evaluated round if it is the best so far (rank 0 only)."""
        if self.best.add(record):
            self._best_model = {"best": model.clone(), **_prefixed(self.net.state())}
            self._best_written = False

    def best_file(self) -> bytes | None:
        """Return the bytes of model-best.safetensors if it must be written anew."""
        if self._best_written or not self._best_model:
            return None
        self._best_written = True
        return model_file(self._best_copy(self._best_model))

    def _best_copy(self, saved: Mapping[str, Tensor]) -> nn.Module:
        return self.net.copy(saved["best"], {name: saved[f"best.{name}"] for name in self.net.state()})

    def share_best(self) -> nn.Module:
        """Return the model of the best round on every rank; collective."""
        names = ["best", *_prefixed(self.net.state())]
        own = [self._best_model[name].numpy(force=True) for name in names] if self._best_model else None
        received = map(torch.tensor, self.cluster.broadcast(own))
        saved = {name: value.to(self.net.device) for name, value in zip(names, received, strict=True)}
        return self._best_copy(saved)

    def moved(self) -> BytesMoved:
        """Return the bytes moved by MPI since the start of the run, across resumptions; collective."""
        moved = self.cluster.share_bytes()
        moved.update(self._moved_before)
        return moved

    def check(self, model: Tensor, round: int) -> None:
        """Require the same model and server vectors of the local algorithm on all ranks; collective."""
        checksum = 0
        for vector in (model, *(self.hooks.server.values() if self.hooks is not None else ())):
            checksum = zlib.crc32(vector.cpu().numpy().data, checksum)
        gathered = self.cluster.gather(np.array([checksum], np.int64))
        checksums = self.cluster.broadcast([np.concatenate(gathered)] if gathered is not None else None)[0]
        others = np.flatnonzero(checksums != checksums[0]).tolist()
        if others:
            parts = [f"{one.kind} {one.name}" for one in custom_components(self.config)]
            asked = f"does a custom component ({', '.join(parts)}) give different results on different ranks, or "
            raise RanksDisagree(
                f"the models of ranks {others} differ from that of rank 0 after round {round}; "
                f"{asked if parts else ''}do the CPUs or torch versions of the nodes differ?"
            )

    def save(self, next_round: int, model: Tensor, settled: int, unsettled: Record | None) -> None:
        """Write a checkpoint from which the run resumes at `next_round`; collective."""
        self.check(model, next_round - 1)
        tensors = self._gathered()
        header: dict[str, Any] = {"data": self.experiment.data_facts.digest, "mpi_bytes": dict(self.moved())}
        header["clients_at_once"] = self.net.clients_at_once
        if self.recorder is not None:
            self.recorder.saved()  # wait for the previous checkpoint, and tidy up the folder
        with writing(self.recorder.folder) if self.recorder else nullcontext():
            if self.hooks is not None and self.hooks.kept:
                path = None if self.recorder is None else clients_file(self.recorder.checkpoints, next_round)
                if digest := save_records(self.cluster, self.hooks.state, path):
                    header["clients"] = digest
        if self.recorder is not None:
            header.update(settled=settled, unsettled=unsettled, frozen=self.net.frozen_checksum)
            best = self._best_model
            self.recorder.checkpoint(next_round, {"model": model, **best, **tensors}, header, self.best_file())

    def resume(self, model: Tensor) -> tuple[int, Record | None]:
        """Return the first round to run, and the record that waits for its evaluation; collective.

        If there is a checkpoint, `model` (d,) is overwritten, and every rank receives its part of the saved state.
        """
        checkpoint = on_server(self.cluster, self._found)
        try:
            first, saved = self._share(checkpoint)
            if checkpoint is not None and self.recorder is not None:
                self._moved_before = BytesMoved(checkpoint.header.get("mpi_bytes", {}))
                unsettled = checkpoint.header["unsettled"] or {}
                self.best = BestRound(self.config, [*self.recorder.history.records, unsettled])
                names = ["best", *_prefixed(self.net.state())] if self.best.record else []
                self._best_model = {name: checkpoint.tensors[name].to(model.device) for name in names}
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint does not fit this run ({raised(error)}). Resume with the version of fedmpi that wrote "
                "it, or choose another --out"
            ) from error
        kept = None
        if checkpoint is not None and self.recorder is not None and checkpoint.header.get("clients"):
            kept = clients_file(self.recorder.checkpoints, first)
        self._load_clients(kept)
        if saved is not None:
            model.copy_(saved)
        return first, None if checkpoint is None else checkpoint.header.get("unsettled")

    def exhausted(self) -> bool:
        """Check whether `evaluation.patience` has ended the run already; collective."""
        return self.config.evaluation.patience is not None and bool(self.cluster.maximum(self.best.exhausted))

    def _found(self) -> Checkpoint | None:
        """Return the checkpoint of the run's folder that the run resumes from, on rank 0 only."""
        if self.recorder is None:
            return None
        found = self.recorder.resume()
        own = self.net.frozen_checksum
        if found is not None and found.header.get("frozen", own) != own:
            raise UserError(
                f"the model's frozen parameters differ from those that {self.recorder.folder} was trained with. "
                "Build the same model again, or choose another --out"
            )
        return found

    def _gathered(self) -> dict[str, Tensor]:
        """Gather the checkpoint's tensors, without the model; collective, complete on rank 0."""
        return {
            **{f"server.{name}": value for name, value in self.optimizer.state().items()},
            **self.decisions.state(),
            **{name: value for part in self.experiment.shared for name, value in part.state().items()},
            **{name: value for part in self.experiment.remembering for name, value in part.state().items()},
            **({} if self.view is None else self.view.state()),
            **({} if self.hooks is None else self.hooks.server_tensors()),
            **({} if self.transport is None else self.transport.gather_state(self.cluster)),
        }

    def _share(self, checkpoint: Checkpoint | None) -> tuple[int, Tensor | None]:
        """Send rank 0's checkpoint to every rank; return the first round and the model, if there is one."""
        names = ["model", *(f"server.{name}" for name in self.optimizer.names), *RESIDUALS]
        names += [] if self.hooks is None else self.hooks.server_tensors()
        names += [name for part in self.experiment.shared for name in part.state()]
        arrays = None
        if self.cluster.is_server:
            saved = checkpoint.tensors if checkpoint else {}
            kept = checkpoint.header.get("clients_at_once", 0) if checkpoint else 0
            first = np.array([checkpoint.next_round if checkpoint else 0, kept], np.int64)
            arrays = [first, *(saved[n].numpy() if n in saved else np.empty(0, np.float32) for n in names)]
        received = self.cluster.broadcast(arrays)
        named = zip(names, received[1:], strict=True)
        tensors = {name: torch.tensor(array, device=self.net.initial.device) for name, array in named if array.size}
        self._check_lengths(tensors)
        if self.net.clients_at_once:  # on GPUs
            self.net.clients_at_once = int(received[0][1]) or -self.cluster.maximum(-self.net.clients_at_once)
            log.info("at most %d clients train at once, as in all rounds of this run", self.net.clients_at_once)
        moments = {name.removeprefix("server."): t for name, t in tensors.items() if name.startswith("server.")}
        self.optimizer.load(moments, int(received[0][0]))
        for shared in self.experiment.shared:
            shared.load(tensors)
        if self.hooks is not None:
            self.hooks.load_server(tensors)
        if self.transport is not None:
            self.transport.load(tensors, range(*self.experiment.layout.owned))
        for part in self.experiment.remembering:
            part.load({} if checkpoint is None else checkpoint.tensors)
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

    def _load_clients(self, path: Path | None) -> None:
        """Read the vectors of this rank's clients from rank 0's file, None if there is none; collective.

        Rank 0 also sends the run's folder, which stores vectors that do not fit into memory.
        """
        if self.hooks is None or not self.hooks.kept:
            return
        layout, state = self.experiment.layout, self.hooks.state
        name = os.fsencode(self.recorder.folder.resolve()) if self.recorder is not None else b""
        (received,) = self.cluster.broadcast([np.frombuffer(name, np.uint8)] if self.cluster.is_server else None)
        state.folder = Path(os.fsdecode(received.tobytes())) if received.size else None
        clients = load_records(self.cluster, state, path, range(*layout.owned))
        if self.homes is not None:
            self.homes.settle(clients, layout.ranks(layout.owners(clients)))


def _prefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the names in a checkpoint of the best round's integer buffers, and the buffers."""
    return {f"best.{name}": value for name, value in state.items()}
