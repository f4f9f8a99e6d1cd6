"""What does not go with the kind of task: losses and metrics of others, and parts that need one class a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmpi.common.task_kinds import KINDS
from fedmpi.config.choices import all_chosen, chosen

if TYPE_CHECKING:
    from fedmpi.common.registry import Part
    from fedmpi.config.tables import ConfigTables

NO_CLASS = {
    "tokens": "a sample of tokens has a target at every position and no class of its own",
    "multilabel": "a sample may have several labels and no class of its own",
    "regression": "a sample has numbers for targets and no class",
}


def task_refusals(c: ConfigTables) -> list[tuple[bool, str]]:
    """Choices that do not go with `task.kind`, each with whether it was made and the sentence about it."""
    kind = KINDS[c.task.kind]
    unfit = [reason for part in _parts(c) if (reason := kind.refusal(part)) is not None]
    refusals = [(True, reason) for reason in unfit[:1]]
    if kind.score != "accuracy":
        refusals += _without_accuracy(c)
    if c.task.kind in NO_CLASS:
        refusals += _without_class(c, NO_CLASS[c.task.kind])
    return refusals


def _parts(c: ConfigTables) -> list[Part]:
    return [chosen(c, "loss"), *all_chosen(c, "metric")]


def _without_accuracy(c: ConfigTables) -> list[tuple[bool, str]]:
    sampler = chosen(c, "client sampler")
    wanted = {*sampler.marks.get("needs", ()), *sampler.marks.get("measures", ())}
    return [
        (
            c.evaluation.target_accuracy is not None,
            f'evaluation.target_accuracy means nothing with task.kind = "{c.task.kind}", which has no accuracy: '
            "remove it",
        ),
        (
            "accuracy" in wanted,
            f'participation.clients = "{sampler.name}" draws clients by their accuracy, which task.kind = '
            f'"{c.task.kind}" does not have',
        ),
    ]


def _without_class(c: ConfigTables, why: str) -> list[tuple[bool, str]]:
    strata = "strata" in chosen(c, "client sampler").marks.get("needs", ())
    refused = [
        (
            strata and c.participation.features == "label-histogram",
            'participation.features = "label-histogram" makes strata of the clients\' class counts',
        ),
        (c.rebalance.enabled, "rebalance.enabled copies the samples of scarce classes (Astraea's augmentation)"),
        (
            c.topology.kind == "mediators" and c.topology.scheduling != "random",
            f'topology.scheduling = "{chosen(c, "scheduling").name}" groups clients by their class counts (Astraea)',
        ),
        (c.topology.kind == "mediators", 'topology.kind = "mediators" records the class counts of its groups'),
        (c.attack.kind == "label-flip", 'attack.kind = "label-flip" turns class y into C - 1 - y'),
        (
            c.system.availability == "label-group",
            'system.availability = "label-group" goes by the most frequent class of a client',
        ),
    ]
    return [(broken, f'{what}, but with task.kind = "{c.task.kind}" {why}') for broken, what in refused]
