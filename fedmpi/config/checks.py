"""Contradictions between the values of a configuration: rows of a condition, the keys that meet, and the reason."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel

from fedmpi.common.calling import calling, takes
from fedmpi.common.options import in_toml
from fedmpi.common.task_kinds import KINDS, kinds_of
from fedmpi.config.keys import components_of, entries
from fedmpi.config.server_tables import Mediators
from fedmpi.config.tables import local_algorithm, stratification

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

Rows = Iterator[tuple[bool, Sequence[str], str]]
"""Whether values contradict each other, the keys of these values, and the reason with the way out."""
DRAWN_BY_SIZE = ("weighted", "clustered-md", "power-of-choice")
SMALLEST_RATE, LARGEST_RATE = 1e-30, 1e30
CALLED_THEMSELVES = ("model", "local optimizer", "data source")
"""Kinds that call the chosen object itself. No instance exists that could reject a configuration."""
INDEPENDENT = ("all", "uniform")
"""Samplers whose draws do not depend on the clients' data."""
NO_CLASS = {
    "tokens": "a sample of tokens has a target at every position and no class of its own",
    "multilabel": "a sample may have several labels and no class of its own",
    "regression": "a sample has numbers for targets and no class",
}


def contradiction(c: ConfigTables) -> str | None:
    """Return the reason why the chosen values cannot be combined, or None."""
    for group in (_selection, _local_steps, _ranks, _own_updates, _sums, _private, _task, _algorithm, _components):
        for broken, keys, reason in group(c):
            if broken:
                return f"{' does not go with '.join(_given(c, key) for key in keys)}: {reason}"
    return None


def _given(c: ConfigTables, key: str) -> str:
    """Return a key with its value; a table without a name as its key alone."""
    value = entries(c)[key].value if key in entries(c) else None
    value = getattr(value, "name", value)
    return key if value is None or isinstance(value, BaseModel) else f"{key} = {in_toml(value)}"


def weighs_twice(c: ConfigTables) -> str | None:
    """Return a warning if sizes determine both the draws and the weights, or None."""
    if c.clients.sampler.name not in DRAWN_BY_SIZE or c.server.weights.name != "samples":
        return None
    return (
        f'clients.sampler = "{c.clients.sampler.name}" draws clients by their n_k, and server.weights = "samples" '
        "multiplies by n_k again, so that a client counts as n_k² on average: the papers weigh each draw alike, "
        'server.weights = "uniform"'
    )


def _selection(c: ConfigTables) -> Rows:
    """Numbers that a sampler needs, and options that conflict with the cohort of all clients or with mediators."""
    sampler, data, needs, measures = c.clients.sampler, c.samples.sampler.component, _needs(c), _measures(c)
    everybody = sampler.name == "all"
    yield (
        not everybody and c.clients.count is None and c.clients.fraction is None,
        ["clients.sampler"],
        "set clients.count or clients.fraction, the clients of a round",
    )
    for pair, values in (
        (("clients.count", "clients.fraction"), (c.clients.count, c.clients.fraction)),
        (("local.epochs", "local.steps"), (c.local.epochs, c.local.steps)),
    ):
        yield None not in values, pair, "they say the same in two ways. Keep one of them"
    by_norm = "norms" in needs or sampler.options.get("within_stratum") == "importance"
    yield (
        by_norm and stratification(c).features.name == "label-histogram",
        ["clients.sampler", "clients.sampler.features"],
        "importance draws need the norms of gradients. Choose other features, or uniform draws",
    )
    yield (
        data.name in ("bernoulli", "exact") and c.samples.budget is None,
        ["samples.sampler"],
        "set samples.budget, the number K of samples per round",
    )
    yield (
        isinstance(c.topology, Mediators) and c.topology.regroup == "once" and not everybody,
        ["topology.regroup", "clients.sampler"],
        'hardly two clients of a group are drawn together. Set clients.sampler = "all" or topology.regroup = '
        '"every-round"',
    )
    invites = c.clients.over_selection > 1
    yield invites and everybody, ["clients.over_selection", "clients.sampler"], "all clients are invited already"
    yield invites and _mediators(c), ["clients.over_selection", "topology"], "only mediators send to the server"
    yield (
        c.devices is not None and data.foreign,
        ["devices", "samples.sampler"],
        "simulated time counts the samples of clients before they train, which a custom data sampler does not report",
    )
    yield (
        "seconds" in {*needs, *measures} and c.devices is None,
        ["clients.sampler"],
        "it draws by seconds, which only simulated time counts. Set devices = true",
    )
    for name, later in (
        ("seconds", data.name == "exact" or c.samples.size.query == "selected"),
        ("update_norm", data.name != "all"),
    ):
        yield (
            name in measures and later,
            ["clients.sampler", "samples.sampler"],
            f"candidates are measured before the clients are drawn, and their samples are chosen after that. Set "
            f'samples.sampler = "all", or draw by past numbers, needs = ("{name}",)',
        )


def _local_steps(c: ConfigTables) -> Rows:
    """Local steps that leave single precision."""
    yield (
        not SMALLEST_RATE <= _last_rate(c) <= LARGEST_RATE,
        ["local.lr", "local.schedule"],
        f"the rate leaves the range of single precision within {c.rounds} rounds. Choose local.schedule.factor nearer "
        "to 1, or a larger local.schedule.every",
    )


def _ranks(c: ConfigTables) -> Rows:
    """Placements of clients on ranks."""
    cluster, keeps = c.cluster, bool(c.compression.values.get("error_feedback"))
    owned = "a client's residual stays where its data is. Switch one of them off"
    for key, broken, reason in (
        ("cluster.placement", cluster.placement == "mediator" and not _mediators(c), "there are no mediators"),
        ("cluster.placement", cluster.placement == "shared" and _mediators(c), 'choose "owner" or "mediator"'),
        ("cluster.server_trains", cluster.server_trains == "always" and _mediators(c), "rank 0 trains no groups"),
    ):
        yield broken, [key, "topology"], reason
    for key, moves in (
        ("cluster.placement", cluster.placement == "shared"),
        ("cluster.balance", cluster.balance == "measured"),
    ):
        yield keeps and moves, [key, "compression.error_feedback"], owned


def _own_updates(c: ConfigTables) -> Rows:
    """Choices that need each client's own update where none is formed."""
    needing = {
        "privacy.clip_norm": c.privacy.clip_norm is not None,
        "logging.diagnostics": c.logging.diagnostics,
        "compression": c.compression.name != "none",
        "server.aggregator": c.server.aggregator.name != "mean",
        "server.weights": hasattr(c.server.weights.component.object, "after"),
        "attack": attacks_updates(c),
        "clients.sampler": "update_norm" in _needs(c),
    }
    for key, needs in (*needing.items(), ("clients.sampler", "update_norm" in _measures(c))):
        yield needs and _mediators(c), [key, "topology"], "each client's own update is needed, and none is formed"


def _sums(c: ConfigTables) -> Rows:
    """Weights that cannot be formed, and choices that need a weighted sum where something else is formed."""
    combines, clips, weights = c.server.aggregator.name != "mean", c.privacy.clip_norm is not None, c.server.weights
    learns, law = hasattr(weights.component.object, "after"), c.clients.availability
    lowest = min(law.options["by_label"]) if law.name == "label-group" else 1.0
    both = ["server.aggregator", "server.weights"]
    yield (
        weights.name == "stratified" and "strata" not in _needs(c),
        ["server.weights", "clients.sampler"],
        'set clients.sampler = "stratified"',
    )
    yield (
        weights.name == "unbiased" and lowest == 0,
        ["server.weights", "clients.availability"],
        "some clients are never available, and weights divide by their probability. Raise it, or set server.weights = "
        '"normalized"',
    )
    yield (
        clips and weights.name != "uniform",
        ["privacy.clip_norm", "server.weights"],
        "what one client sends is bounded before these weights multiply it by numbers of its data. Set "
        'server.weights = "uniform"',
    )
    yield clips and combines, ["privacy.clip_norm", "server.aggregator"], "only the mean is a sum of bounded updates"
    yield combines and bool(weights.component.marks.get("averages_models")), both, "these weights average models"
    yield combines and learns, both, "these weights divide a sum by what they learn from the updates"
    yield (
        learns and c.logging.diagnostics,
        ["logging.diagnostics", "server.weights"],
        "diagnostics weigh updates as planned, and these weights change afterwards",
    )


def _private(c: ConfigTables) -> Rows:
    """Choices under which one client's data changes more than its own update, so that no ε would hold."""
    if c.privacy.clip_norm is None or c.privacy.noise_multiplier == 0:
        return
    data, size = c.samples.sampler.component, c.samples.size
    sizes = 'set samples.sampler = "all" or "ratio", or "bernoulli" with a private samples.size.estimate'
    bernoulli = data.name == "bernoulli"
    for key, broken, changes, advice in (
        ("clients.sampler", c.clients.sampler.name not in INDEPENDENT, "which others are selected", 'set "uniform"'),
        (
            "clients.availability",
            c.clients.availability.component.foreign,
            "which others are available",
            "choose a built-in model",
        ),
        ("samples.sampler", data.name == "exact", "the samples of others by its size", sizes),
        ("samples.size.estimate", bernoulli and size.estimate == "exact", "the samples of others by its size", sizes),
        ("samples.size.clip", bernoulli and not size.clip, "the share of samples of others", "leave it true"),
        ("samples.sampler", data.foreign and bool(data.marks.get("pooled")), "the samples of others", sizes),
        ("samples.budget", data.foreign and c.samples.budget is not None, "the samples of others", "leave it out"),
        ("rebalance", c.rebalance is not None, "the copies of others' samples", "switch it off"),
    ):
        yield broken, [key, "privacy.noise_multiplier"], f"one client may change {changes}, and no ε holds: {advice}"


def _task(c: ConfigTables) -> Rows:
    """Losses and metrics of other kinds of tasks, and components that need one class per sample."""
    kind = KINDS[c.task.kind]
    for key, chosen in (("task.loss", c.task.loss), *(("task.metrics", metric) for metric in c.task.metrics)):
        yield (
            not kind.fits(chosen.component),
            ["task.kind"],
            f'{key} = "{chosen.name}" is for {" or ".join(kinds_of(chosen.component))}',
        )
    no_accuracy = kind.score != "accuracy"
    for key, broken in (
        ("evaluation.target_accuracy", c.evaluation.target_accuracy is not None),
        ("clients.sampler", "accuracy" in {*_needs(c), *_measures(c)}),
    ):
        yield no_accuracy and broken, [key, "task.kind"], "it has no accuracy"
    by_histogram = "strata" in _needs(c) and stratification(c).features.name == "label-histogram"
    for key, broken in (
        ("clients.sampler.features", by_histogram),
        ("rebalance", c.rebalance is not None),
        ("topology", _mediators(c)),
        ("attack", hasattr(c.attack.component.object, "labels")),
        ("clients.availability", c.clients.availability.name == "label-group"),
    ):
        reason = NO_CLASS.get(kind.name)
        yield reason is not None and broken, [key, "task.kind"], f"classes of samples are needed, but {reason}"


def _algorithm(c: ConfigTables) -> Rows:
    """Choices that contradict what the local algorithm declares."""
    found = local_algorithm(c)
    if found is None:
        return
    sends = bool(found[1].sums or found[1].numbers)
    carries, more = sends or bool(found[1].client_state), "clients keep or send more than their update"
    for key, broken, reason in (
        ("topology", _mediators(c), "each client's own update is needed, and none is formed"),
        (
            "clients.sampler.initial_step",
            stratification(c).initial_step,
            "whole rounds are needed",
        ),
        ("privacy.clip_norm", carries and c.privacy.clip_norm is not None, f"{more}, which is not bounded: no ε holds"),
        ("compression", carries and c.compression.name != "none", f"{more}, which is not compressed"),
        ("server.aggregator", sends and c.server.aggregator.name != "mean", f"{more}, which only the mean combines"),
        ("attack", sends and attacks_updates(c), f'{more}. Set attack = "label-flip"'),
    ):
        yield broken, ["local.algorithm", key], reason


def _components(c: ConfigTables) -> Rows:
    """Configurations that a chosen component rejects by its method `refuses(config)`."""
    for key, chosen in components_of(c):
        if not chosen.is_component or chosen.kind in CALLED_THEMSELVES:
            continue
        part = chosen.component
        if not hasattr(part.object, "refuses"):
            continue
        with calling(part):
            judge = chosen.make() if inspect.isclass(part.object) else part.object
            takes(part, judge.refuses, "config", method="refuses")
            reason = judge.refuses(c)
        yield bool(reason), [key], f"it rejects the other choices: {reason}"


def _needs(c: ConfigTables) -> tuple[str, ...]:
    """Return what the client sampler needs of the server."""
    needs: tuple[str, ...] = c.clients.sampler.component.marks.get("needs", ())
    return needs


def _measures(c: ConfigTables) -> tuple[str, ...]:
    """Return what is measured for the client sampler's candidates."""
    measures: tuple[str, ...] = c.clients.sampler.component.marks.get("measures", ())
    return measures


def attacks_updates(c: ConfigTables) -> bool:
    """Check whether attackers send other updates than they have trained, and not only train on other labels."""
    return c.attack.name != "none" and not hasattr(c.attack.component.object, "labels")


def _mediators(c: ConfigTables) -> bool:
    return c.topology.name == "mediators"


def _last_rate(c: ConfigTables) -> float:
    """Return the learning rate of the last round of the step schedule, infinite beyond floats; else local.lr."""
    schedule = c.local.schedule
    if schedule.name != "step":
        return c.local.lr
    with suppress(OverflowError):
        return float(c.local.lr * schedule.options["factor"] ** ((c.rounds - 1) // schedule.options["every"]))
    return math.inf
