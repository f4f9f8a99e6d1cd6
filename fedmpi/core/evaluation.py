"""Evaluation of the global model: rank 0 on the test and validation parts, all ranks on each client's own samples.

The evaluated clients are divided into parts that depend on the clients alone, and each worker evaluates whole parts.
The result is therefore bit-identical for any number of ranks if the model is. Rank 0 gathers one row per client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.apportionment import places_within
from fedmpi.common.calling import during
from fedmpi.common.errors import Divergence, UserError
from fedmpi.common.fairness import spread_over_clients
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.task_kinds import CLASSIFICATION, KINDS
from fedmpi.common.types import Bools, Floats, Ints
from fedmpi.config import Config
from fedmpi.config.tables import EvaluationTable
from fedmpi.core.placement import Layout
from fedmpi.core.worker import Trainer
from fedmpi.data.augmentation import Rebalancing
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import RESIDENT_BYTES, ClientData, loaded_ahead
from fedmpi.local.traits import couples_in_evaluation, rows_of_a_pass
from fedmpi.local.work import LARGEST_LOSS, ClientTask, check_loss, check_update, named_client
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from fedmpi.records.history import Record
from fedmpi.records.tables import Columns
from fedmpi.tasks.evaluation import (
    JUDGED,
    LOSS,
    RIGHT,
    WEIGHT,
    Evaluation,
    client_sums,
    cut,
    evaluate,
    has_accuracy,
    rows_per_pass,
)
from fedmpi.tasks.metrics import Metric

MOST_ROWS = 2000
"""Default number of samples evaluated at once, unless they are too wide."""
NAMES = {"test": "test", "val": "validation"}

log = logging.getLogger("fedmpi")
FINE_TUNING = 1 << 24
"""Visit number that selects the random streams of fine-tuning; larger than any mediator's visit number."""
SumsOfClients = Callable[[Ints], Floats]


def task_metrics(config: Config) -> list[Metric]:
    """Return the metrics of a run: those of its kind of task, and those in `task.metrics`."""
    always = KINDS[config.task.kind].metrics
    listed = [metric for metric in config.task.metrics if metric.given or metric.name not in always]
    return [
        *(Metric(resolve("metric", name)) for name in always),
        *(Metric(metric, metric.options) for metric in listed),
    ]


def rows_evaluated(table: EvaluationTable, model: FlatModel, description: DataDescription) -> int:
    """Return the number of samples that a model is evaluated on at once (`evaluation.batch_size`)."""
    if table.batch_size == "auto":
        return rows_of_a_pass(model, description, MOST_ROWS)
    return rows_per_pass(description, table.batch_size)


class EvaluatedParts:
    """Parts of a data set (test, validation) that a run evaluates on."""

    def __init__(self, config: Config, store: ShardStore, data: ClientData):
        self.names = config.evaluation.parts(store.part_samples("val") > 0)
        self._data, self._table, self._streams = data, config.evaluation, Streams(config.seed)
        self._rows: int | None = None
        self.metrics = task_metrics(config)
        self.confusion: Ints | None = None  # of the test part, after the last evaluation
        self.class_names = store.manifest.class_names
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        for part in self.names:
            if not store.part_samples(part):
                other = "val" if part == "test" else "test"
                raise UserError(
                    f'evaluation.on = "{config.evaluation.on}" needs {NAMES[part]} samples, but '
                    f"{config.data.source.name} has none. Prepare it with --val FRACTION, or set evaluation.on = "
                    f'"{other}"'
                )

    def scores(self, flat: FlatModel, model: Tensor, round: int) -> dict[str, float]:
        """Return loss, task metrics and chosen metrics of the global model (d,) after a round, for each part."""
        if self._rows is None:
            self._rows = rows_evaluated(self._table, flat, self._data.description)
        facts: dict[str, float] = {}
        for part in self.names:
            with flat.loss.kept_generators(), during(round):
                found = self._evaluated(flat, model, part, round)
            unlikely = flat.loss.kind is CLASSIFICATION and found.loss == math.inf  # a class that is masked by -inf
            if not (abs(found.loss) < LARGEST_LOSS or unlikely):
                raise Divergence(
                    f"the loss on the {NAMES[part]} samples is {found.loss:g} after round {round}, so training "
                    "diverged. Lower local.lr or server.optimizer.lr"
                )
            facts |= found.facts(part)
            if part == "test":
                self.confusion = found.confusion
        return facts

    def _evaluated(self, flat: FlatModel, model: Tensor, part: str, round: int) -> Evaluation:
        """Evaluate the model on a part."""
        assert self._rows is not None
        x, y = self.samples(part)
        at = round, list(NAMES).index(part)
        with flat.evaluating(model, self._streams, Purpose.EVALUATION, *at) as module:
            return evaluate(module, x, y, self._rows, flat.loss, self.metrics, flat.part)

    def samples(self, part: str) -> tuple[Tensor, Tensor]:
        """Return features and labels of "test" or "val" on this rank's device; cache them if they are not too large."""
        if part in self._kept:
            return self._kept[part]
        found = self._data.test() if part == "test" else self._data.validation()
        assert found is not None
        if found[0].numel() * found[0].element_size() <= RESIDENT_BYTES:
            self._kept[part] = found
        return found


@dataclass(frozen=True)
class OwnRows:
    """Samples that each client is evaluated on."""

    data: ClientData  # Reads the samples
    held_out: bool  # True if the samples are held out; otherwise the training samples, without copies
    # (N,): Client k has counts[k] samples from starts[k] on, in the validation or the training part
    starts: Ints
    counts: Ints

    @classmethod
    def of(cls, data: ClientData, rebalancing: Rebalancing | None) -> OwnRows:
        """Select the held-out samples if the data record their clients, else the training samples."""
        store = data.store
        offsets = store.validation_offsets if store.part_samples("val") else None
        if offsets is not None:
            return cls(data, True, offsets[:-1], np.diff(offsets))
        counts = store.sizes if rebalancing is None else rebalancing.original_sizes
        return cls(data, False, store.offsets[:-1], counts)

    @property
    def kind(self) -> str:
        """Description in words, for the summary."""
        return "held-out rows" if self.held_out else "training rows"

    def load(self, clients: Ints) -> tuple[Tensor, Tensor]:
        """Load features and labels of these clients, ascending and each with samples, concatenated."""
        counts = self.counts[clients]
        load = self.data.load_held_out if self.held_out else self.data.load_positions
        return load(np.repeat(self.starts[clients], counts) + places_within(counts))


class ClientsView:
    """Evaluation of the global model on single clients (`evaluation.clients`)."""

    def __init__(
        self, config: Config, cluster: Cluster, streams: Streams, rows: OwnRows, layout: Layout, trainer: Trainer
    ):
        self.config, self.part, self.cluster = config, config.evaluation, cluster
        self.streams, self.rows, self.layout = streams, rows, layout
        self.worker, self.engine = trainer.worker, trainer.sequential
        self.model, self.store, self.description = self.engine.model, rows.data.store, rows.data.description
        self.hooks, self.homes = trainer.hooks, trainer.homes
        self.loss = self.model.loss
        self.used = np.zeros(len(rows.counts), np.int64)
        self._most = rows_evaluated(self.part, self.model, self.description)
        self._panel = self._drawn()
        self._shared: tuple[Ints, Ints, list[Ints]] | None = None
        self._point: Tensor | None = None
        if cluster.is_server and not rows.held_out:
            log.info("clients are evaluated on their training rows: the data hold none out of each (data_prep --val)")

    @property
    def tunes(self) -> bool:
        """True if each client's own fine-tuned model is evaluated too."""
        return self.part.fine_tune > 0

    def due(self, t: int) -> bool:
        """Check whether clients are evaluated after round t."""
        return (t + 1) % self.part.clients_every == 0 or t + 1 == self.config.rounds

    def count(self, plan: Plan) -> None:
        """Count the selected clients."""
        self.used[plan.clients] += 1

    def look(self, plan: Plan, w: Tensor) -> Columns | None:
        """Evaluate the global model w (d,), and personal models, after a round; collective, rank 0 gets the table."""
        clients, parts = self._shares(plan)
        gathered = self._gathered(parts, partial(self._evaluated, plan.round, w))
        table = {} if gathered is None else self._table(plan.round, clients, gathered)
        if self.hooks is not None and self.hooks.personalizes:
            (used,) = self.cluster.broadcast([self.used] if self.cluster.is_server else None)
            used = (used > 0) | (not self.hooks.kept)
            used &= self.store.sizes >= self.model.least  # without samples, nothing is trained or chosen
            self.hooks.begin(plan.round, w, {})
            if self.homes is not None:
                trained = clients[used[clients]]
                self.homes.bring(trained, self.layout.ranks(self.layout.owners(trained)))
            gathered = self._gathered([self.layout.own(clients)], partial(self._personal, plan, w, used), 5)
            if gathered is not None:
                table |= {f"personal_{name}": column for name, column in self._scores(gathered).items()}
                copy = np.nan_to_num(gathered[:, 4], nan=-1).astype(np.int64)
                table |= {"copy": copy} if self.model.copies else {}
        return table or None

    def tune(self, plan: Plan, w: Tensor) -> Columns | None:
        """Evaluate each such client's own model, fine-tuned from w (d,). Collective; rank 0 receives table columns.

        Personal values are those of the client, which `look` has brought to its owner.
        """
        clients, parts = self._shares(plan)
        parts = [self.layout.own(clients)] if self.model.personal else parts
        gathered = self._gathered(parts, partial(self._tuned, plan, w))
        if gathered is None:
            return None
        return {f"tuned_{name}": column for name, column in self._scores(gathered).items()}

    def _personal(self, plan: Plan, w: Tensor, used: Bools, clients: Ints) -> Floats:
        """Return the sums (k, 5) of a part's clients, each for its personal model, and the copy of the model it uses.

        They are NaN before the first selection, and for clients with too few samples to train on.
        """
        sums = np.full((len(clients), 5), np.nan)
        for place in np.flatnonzero(used[clients]).tolist():
            own = self._personal_model(int(clients[place]), w, plan)
            sums[place, :4] = self._evaluated(plan.round, own, clients[place : place + 1])
            sums[place, 4] = self.model.active or 0
            check_loss(sums[place, LOSS], plan.lr)
        self.model.active = None
        return sums

    def _personal_model(self, client: int, w: Tensor, plan: Plan) -> Tensor:
        """Return the whole vector of a client's personal model at the shared values w (d,)."""
        return self.engine.personal_model(client, w, self.worker.rule(replace(plan, one_step=False)), plan.round)

    def state(self) -> dict[str, Tensor]:
        """Return how often each client was selected, for a checkpoint."""
        return {"clients_view.used": torch.from_numpy(self.used)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the state of a checkpoint; raise KeyError if it is missing."""
        self.used[:] = state["clients_view.used"].numpy()

    def _drawn(self) -> Ints | None:
        """Return the clients that are evaluated every time, or None for the clients of the round."""
        holding, wanted = np.flatnonzero(self.rows.counts), self.part.clients
        if wanted == "participants":
            return None
        if wanted == "all" or wanted is None:
            return holding
        if int(wanted) > len(holding):
            raise UserError(
                f"evaluation.clients = {wanted}, but {len(holding)} of the {len(self.used)} clients of "
                f'{self.config.data.source.choice} have {self.rows.kind}. Give at most this number, or "all"'
            )
        generator = self.streams.generator(Purpose.CLIENTS_VIEWED)
        return np.sort(generator.choice(holding, int(wanted), replace=False, shuffle=False))

    def _shares(self, plan: Plan) -> tuple[Ints, list[Ints]]:
        """Return the clients (k,) evaluated after this round, ascending, and this rank's parts of them."""
        panel = self._panel
        clients = np.unique(plan.clients[self.rows.counts[plan.clients] > 0]) if panel is None else panel
        key = plan.clients if panel is None else panel
        if self._shared is None or self._shared[0] is not key:
            alone = couples_in_evaluation(self.model, self.description)
            counts = self.rows.counts[clients]
            borders = np.arange(len(clients) + 1) if alone else cut(counts, self._most)
            first, last = self._own_parts(clients, np.concatenate(([0], np.cumsum(counts)))[borders], borders)
            self._shared = key, clients, [clients[a:b] for a, b in pairwise(borders[first : last + 1].tolist())]
        return self._shared[1:]

    def _own_parts(self, clients: Ints, rows: Ints, borders: Ints) -> tuple[int, int]:
        """Return this rank's parts: equal sample counts if any rank may read all data, else its own clients."""
        worker, workers = self.layout.worker, self.layout.workers
        if worker is None:
            return 0, 0
        if self.layout.shared:
            limits = rows[-1] * np.arange(workers + 1) // workers
            first, last = np.searchsorted(rows[:-1], limits[worker : worker + 2])
        else:
            first, last = np.searchsorted(clients[borders[:-1]], self.layout.owned)
        return int(first), int(last)

    def _gathered(self, parts: list[Ints], measure: SumsOfClients, columns: int = 4) -> Floats | None:
        """Gather the sums (k, columns) of all clients, ascending, on rank 0; each rank measures its own parts."""
        with self.loss.kept_generators():
            own = [measure(clients) for clients in parts]
        mine = np.concatenate(own) if own else np.empty((0, columns))
        everybody = self.cluster.gather(mine.ravel())
        return None if everybody is None else np.concatenate(everybody).reshape(-1, columns)

    def _evaluated(self, t: int, w: Tensor, clients: Ints) -> Floats:
        """Return the sums (k, 4) of a part's clients for the parameters w (d,)."""
        x, y = self.rows.load(clients)
        at = Purpose.CLIENT_EVALUATION, t, int(clients[0])
        with self.model.evaluating(w, self.streams, *at) as module:
            return client_sums(module, x, y, self.rows.counts[clients], self.loss, self._most, self.model.part)

    def _tuned(self, plan: Plan, w: Tensor, clients: Ints) -> Floats:
        """Return the sums (k, 4) of a part's clients, each for its own fine-tuned model."""
        rule = replace(self.worker.rule(replace(plan, one_step=False)), epochs=self.part.fine_tune, steps=None)
        sums = np.empty((len(clients), 4))
        self._point = torch.empty_like(self.model.whole) if self._point is None else self._point
        tasks = [ClientTask(client, None, 0.0, visit=FINE_TUNING) for client in clients.tolist()]
        samples = loaded_ahead(self.engine.load, tasks, w.device)
        for place, task in enumerate(tasks):
            with named_client(task.client, self.cluster.rank):
                own = self.model.personal or self.model.copies
                start = self._personal_model(task.client, w, plan) if own else w
                self.engine.advance(self._point.copy_(start), task, rule, plan.round, samples)
                check_update(self._point - start, rule.lr)
            sums[place] = self._evaluated(plan.round, self._point, clients[place : place + 1])
        self.model.active = None
        return sums

    def _table(self, t: int, clients: Ints, sums: Floats) -> Columns:
        return {
            "round": np.full(len(clients), t),
            "client": clients,
            "samples": self.rows.counts[clients],
            "training_samples": self.store.sizes[clients],
            "times_used": self.used[clients],
            **self._scores(sums),
        }

    def _scores(self, sums: Floats) -> Columns:
        """Return every client's loss and, if the task has one, accuracy; NaN if no prediction could be correct."""
        columns = {"loss": sums[:, LOSS] / sums[:, WEIGHT]}
        if has_accuracy(self.loss.kind):
            with np.errstate(invalid="ignore"):
                columns["accuracy"] = sums[:, RIGHT] / sums[:, JUDGED]
        return columns


def facts_of(table: Columns) -> Record:
    """Return the record entries on the clients evaluated after a round: `spread_over_clients` of every score."""
    facts: Record = {}
    for score in ("accuracy", "loss", "tuned_accuracy", "tuned_loss", "personal_accuracy", "personal_loss"):
        if score not in table:
            continue
        values, samples = table[score], table["samples"].astype(np.float64)
        known = np.ones(len(values), bool) if score in ("loss", "tuned_loss") else ~np.isnan(values)
        if known.any():
            measures = spread_over_clients(
                values[known], samples[known], "smallest" if score.endswith("loss") else "largest"
            )
            facts |= {f"client_{score}_{name}": value for name, value in measures.items()}
    return facts
