"""What the global model is evaluated on: the test part, the validation part, or both (`evaluation.on`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedmpi.common.calling import during
from fedmpi.common.errors import Divergence, UserError
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.task_kinds import CLASSIFICATION, KINDS
from fedmpi.config import Config
from fedmpi.config.choices import all_chosen, options_of_part
from fedmpi.config.server_tables import EvaluationTable
from fedmpi.data.copies.client_samples import SampleSource
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import RESIDENT_BYTES
from fedmpi.local.failures import LARGEST_LOSS, halved
from fedmpi.local.isolation import evaluating
from fedmpi.local.traits import rows_of_a_pass
from fedmpi.models.flat import FlatModel
from fedmpi.records.confusion import Confusion
from fedmpi.tasks.evaluation import Evaluation, evaluate, rows_per_pass
from fedmpi.tasks.metrics import Metric

MOST_ROWS = 2000
"""Samples evaluated at once unless the configuration says another number, or they are too wide."""
NAMES = {"test": "test", "val": "validation"}


def task_metrics(config: Config) -> list[Metric]:
    """What a run measures: what its kind of task always does, and what else `task.metrics` names."""
    always = KINDS[config.task.kind].metrics
    chosen = [*(resolve("metric", name) for name in always), *all_chosen(config, "metric")]
    return [Metric(part, options_of_part(config, part)) for part in dict.fromkeys(chosen)]


def rows_evaluated(table: EvaluationTable, model: FlatModel, description: DataDescription) -> int:
    """Samples that a model is evaluated on at once (`evaluation.batch_size`)."""
    if table.batch_size == "auto":
        return rows_of_a_pass(model, description, MOST_ROWS)
    return rows_per_pass(description, table.batch_size)


class EvaluatedParts:
    """The parts of a data set that a run evaluates on."""

    def __init__(self, config: Config, store: ShardStore, data: SampleSource):
        self.names = config.evaluation.parts(store.part_samples("val") > 0)
        self._data, self._table, self._streams = data, config.evaluation, Streams(config.seed)
        self._rows: int | None = None
        self.metrics = task_metrics(config)
        self.confusion: Confusion | None = None
        self._names = store.manifest.class_names
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        for part in self.names:
            if not store.part_samples(part):
                other = "val" if part == "test" else "test"
                raise UserError(
                    f'evaluation.on = "{config.evaluation.on}" needs {NAMES[part]} samples, but {config.data.shards} '
                    f'has none: prepare it with --val FRACTION, or set evaluation.on = "{other}"'
                )

    def scores(self, flat: FlatModel, model: Tensor, round: int) -> dict[str, float]:
        """Loss, metrics of the task and what else is chosen of the global model (d,) behind a round, on each part."""
        if self._rows is None:
            self._rows = rows_evaluated(self._table, flat, self._data.description)
        facts: dict[str, float] = {}
        for part in self.names:
            with flat.loss.kept_generators(), during(round):
                found = self._evaluated(flat, model, part, round)
            unlikely = flat.loss.kind is CLASSIFICATION and found.loss == math.inf  # a class that is masked by -inf
            if not (abs(found.loss) < LARGEST_LOSS or unlikely):
                raise Divergence(
                    f"the loss on the {NAMES[part]} samples is {found.loss:g} after round {round}: training diverged; "
                    "lower local.lr or aggregation.lr"
                )
            facts |= found.facts(part)
            if part == "test" and found.confusion is not None:
                self.confusion = Confusion(found.confusion, self._names)
        return facts

    def _evaluated(self, flat: FlatModel, model: Tensor, part: str, round: int) -> Evaluation:
        """The evaluation, with half as many samples at once as often as the device has no memory for more."""
        assert self._rows is not None
        x, y = self.samples(part)
        rows = min(self._rows, len(y))
        while True:
            try:
                at = round, list(NAMES).index(part)
                with evaluating(flat, model, self._streams, Purpose.EVALUATION, *at) as module:
                    return evaluate(module, x, y, rows, flat.loss, self.metrics, flat.part)
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
            self._rows = rows = halved(rows, "samples evaluated")

    def samples(self, part: str) -> tuple[Tensor, Tensor]:
        """Features and labels of "test" or "val" on this rank's device; kept if they are not too large."""
        if part in self._kept:
            return self._kept[part]
        found = self._data.test() if part == "test" else self._data.validation()
        assert found is not None
        if found[0].numel() * found[0].element_size() <= RESIDENT_BYTES:
            self._kept[part] = found
        return found
