"""Contradictions between the values of a configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from fedmpi.common.calling import calling, takes
from fedmpi.common.task_kinds import KINDS
from fedmpi.config.base import ALTERNATIVES
from fedmpi.config.keys import components_of, value_of
from fedmpi.config.server_tables import Mediators
from fedmpi.config.stratification import stratification
from fedmpi.config.tables import local_algorithm

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

Checks = Iterator[tuple[bool, str]]
"""Pairs of a condition that is a contradiction, and the sentence about it."""
DRAWN_BY_SIZE = ("weighted", "clustered-md", "power-of-choice")
SMALLEST_RATE, LARGEST_RATE = 1e-30, 1e30
CALLED_THEMSELVES = ("model", "local optimizer", "data source")
"""Kinds that call the chosen object itself. No instance exists that could reject a configuration."""
DRAWN_BY = {
    "all": "",
    "uniform": "",
    "weighted": "their private sizes n_k",
    "importance": "the norms of their gradients",
    "stratified": "strata of their gradients or labels",
}
NO_CLASS = {
    "tokens": "a sample of tokens has a target at every position and no class of its own",
    "multilabel": "a sample may have several labels and no class of its own",
    "regression": "a sample has numbers for targets and no class",
}


def contradiction(c: ConfigTables) -> str | None:
    """Return the reason why the chosen values cannot be combined, or None."""
    for group in (
        _numbers_of_clients_and_samples,
        _local_steps,
        _weights,
        _selection,
        _ranks,
        _own_updates,
        _numbers,
        _sums,
        _private,
        _task,
        _algorithm,
    ):
        for broken, reason in group(c):
            if broken:
                return reason
    return next((reason for broken, reason in _refused_by_components(c) if broken), None)


def weighs_twice(c: ConfigTables) -> str | None:
    """Return a warning if sizes determine both the draws and the weights, or None."""
    if c.clients.sampler.name not in DRAWN_BY_SIZE or c.server.weights.name != "samples":
        return None
    return (
        f'clients.sampler = "{c.clients.sampler.name}" draws clients by their n_k, and server.weights = "samples" '
        "multiplies by n_k again, so that a client counts as n_k² on average: the papers weigh each draw alike, "
        'server.weights = "uniform"'
    )


def _numbers_of_clients_and_samples(c: ConfigTables) -> Checks:
    """Numbers that a sampler needs, and pairs of keys of which one is enough."""
    sampler, rows = c.clients.sampler, c.samples.sampler.name
    yield (
        sampler.name != "all" and c.clients.count is None and c.clients.fraction is None,
        f'clients.sampler = "{sampler.name}" needs to know how many: set clients.count or clients.fraction',
    )
    for one, other in ALTERNATIVES:
        values = [value_of(c, key) for key in (one, other)]
        yield (
            None not in values,
            f"{one} = {values[0]} and {other} = {values[1]} say the same in two ways. Keep one of them",
        )
    by_norm = "norms" in _needs(c) or sampler.options.get("within_stratum") == "importance"
    yield (
        by_norm and stratification(c).features.name == "label-histogram",
        'importance draws need the norms of gradients, which clients.sampler.features = "label-histogram" lacks: set '
        'clients.sampler.within_stratum = "uniform"',
    )
    yield (
        rows in ("bernoulli", "exact") and c.samples.budget is None,
        f'samples.sampler = "{rows}" needs samples.budget, the number K of samples per round',
    )


def _local_steps(c: ConfigTables) -> Checks:
    """Local steps that leave single precision, or that a merged gradient cannot replace."""
    yield (
        not SMALLEST_RATE <= _last_rate(c) <= LARGEST_RATE,
        f"local.lr = {c.local.lr:g} leaves the range of single precision within {c.rounds} rounds of "
        f'local.schedule = "{c.local.schedule.name}": choose a local.schedule.factor nearer 1, or a larger '
        "local.schedule.every",
    )
    yield (
        _merged(c) and (c.local.optimizer.name != "sgd" or _mediators(c)),
        'local.engine = "merged" takes one SGD step from the same model: it needs local.optimizer = "sgd", a star',
    )


def _weights(c: ConfigTables) -> Checks:
    """Weights that divide by numbers which the sampler or the availability model cannot give."""
    weights, availability = c.server.weights.name, c.clients.availability
    lowest = min(availability.options["by_label"]) if availability.name == "label-group" else 1.0
    yield (
        weights == "stratified" and "strata" not in _needs(c),
        'server.weights = "stratified" needs clients.sampler = "stratified"',
    )
    yield (
        weights == "unbiased" and lowest == 0,
        'server.weights = "unbiased" divides by the probability of being there, but with a 0 in '
        "clients.availability.by_label some clients are never there: raise it, or set "
        'server.weights = "normalized", which estimates over the clients that come',
    )


def _selection(c: ConfigTables) -> Checks:
    """Options of client selection that conflict with the cohort of all clients or with mediators."""
    everybody = c.clients.sampler.name == "all"
    yield (
        isinstance(c.topology, Mediators) and c.topology.regroup == "once" and not everybody,
        'topology.regroup = "once" groups all clients once; a drawn cohort would leave hardly two of a group together: '
        'set clients.sampler = "all" or topology.regroup = "every-round"',
    )
    yield (
        c.clients.over_selection > 1 and everybody,
        'clients.over_selection invites more clients than needed, but clients.sampler = "all" asks all of them',
    )
    yield (
        c.clients.over_selection > 1 and _mediators(c),
        "clients.over_selection takes the first updates to arrive at the server, to which only mediators send with "
        'topology = "mediators"',
    )


def _ranks(c: ConfigTables) -> Checks:
    """Placements of clients on ranks."""
    cluster, feedback = c.cluster, c.compression.values.get("error_feedback")
    yield (
        cluster.placement == "mediator" and not _mediators(c),
        'cluster.placement = "mediator" needs topology = "mediators"',
    )
    yield (
        cluster.placement == "shared" and _mediators(c),
        'cluster.placement = "shared" is for a star: with mediators choose "owner" or "mediator"',
    )
    for name, moves in (("placement", "shared"), ("balance", "measured")):
        yield (
            bool(feedback) and getattr(cluster, name) == moves,
            f'cluster.{name} = "{moves}" moves clients between ranks, but compression.error_feedback keeps a client\'s '
            "residual where its data is: switch one of them off",
        )
    yield (
        _mediators(c) and cluster.server_trains == "always",
        'cluster.server_trains = "always" does not go with topology = "mediators": rank 0 runs no relays',
    )


def _own_updates(c: ConfigTables) -> Checks:
    """Choices that need each client's own update where none is formed."""
    weights, sampler = c.server.weights, c.clients.sampler
    needing = {
        "privacy.clip_norm": c.privacy.clip_norm is not None,
        "logging.diagnostics": c.logging.diagnostics,
        f'compression = "{c.compression.name}"': c.compression.name != "none",
        f'server.aggregator = "{c.server.aggregator.name}"': c.server.aggregator.name != "mean",
        f'server.weights = "{weights.name}"': hasattr(weights.component.object, "after"),
        f'attack = "{c.attack.name}"': c.attack.name in ("sign-flip", "noise"),
        f'clients.sampler = "{sampler.name}" (draws by update norms)': "update_norm" in _needs(c),
    }
    relayed = {
        **needing,
        'local.on_divergence = "drop"': c.local.on_divergence == "drop",
        f'clients.sampler = "{sampler.name}"': "update_norm" in _measures(c),
    }
    for chosen, way, broken in (
        (_mediators(c), 'topology = "mediators"', relayed),
        (_merged(c), 'local.engine = "merged"', {**needing, "server.exact": c.server.exact}),
    ):
        for what, needed in broken.items():
            yield chosen and needed, f"{what} needs each client's own update, which {way} never forms"
    yield (
        c.privacy.clip_norm is not None and weights.name != "uniform",
        f'privacy.clip_norm bounds what one client sends, but server.weights = "{weights.name}" multiplies it by what '
        'depends on the clients\' data: set server.weights = "uniform"',
    )


def _numbers(c: ConfigTables) -> Checks:
    """Numbers of clients that samplers and the simulated clock need before they are known."""
    data = c.samples.sampler.component
    rule, sampler = f'samples.sampler = "{data.name}"', f'clients.sampler = "{c.clients.sampler.name}"'
    yield (
        c.devices is not None and data.foreign,
        "devices (simulated time) counts the samples of every selected client before it trains, which "
        f"{rule} does not report. Switch devices off, or choose a built-in data sampler",
    )
    yield (
        "seconds" in {*_needs(c), *_measures(c)} and c.devices is None,
        f"{sampler} draws by the seconds of clients, which are counted only in simulated time. Set devices = true",
    )
    yield (
        "seconds" in _measures(c) and (data.name == "exact" or c.samples.size.query == "selected"),
        f"{sampler} measures the seconds of its candidates before it draws, but with {rule} a client's samples, and "
        'with them its seconds, depend on the selected clients: set samples.sampler = "all", or draw by past seconds, '
        'needs = ("seconds",)',
    )
    yield (
        "update_norm" in _measures(c) and data.name != "all",
        f"{sampler} measures the updates of its candidates before it draws, but {rule} chooses a client's samples only "
        'once the selected clients are known: set samples.sampler = "all", or draw by past updates, '
        'needs = ("update_norm",)',
    )


def _sums(c: ConfigTables) -> Checks:
    """Choices that need a weighted sum of updates, where the aggregator or the weights form something else."""
    combines, weights = c.server.aggregator.name != "mean", c.server.weights.component
    aggregator, judging = f'server.aggregator = "{c.server.aggregator.name}"', f'server.weights = "{weights.name}"'
    judged = hasattr(weights.object, "after")
    yield (
        combines and c.privacy.clip_norm is not None,
        f"privacy.clip_norm bounds what one client adds to a sum, which {aggregator} does not form: set "
        'server.aggregator = "mean", or "norm-clip" without privacy.clip_norm',
    )
    yield (
        combines and bool(weights.marks.get("averages_models")),
        f"{judging} averages models, and {aggregator} combines updates: choose other weights",
    )
    yield (
        combines and judged,
        f"{judging} divides a sum by what it learns from the updates, and {aggregator} forms no sum: choose one of "
        "them",
    )
    yield (
        judged and c.logging.diagnostics,
        f"logging.diagnostics weighs updates as planned, which {judging} changes afterwards: switch it off",
    )


def _private(c: ConfigTables) -> Checks:
    """Choices under which one client's data changes more than its own update, so that no ε would hold."""
    if c.privacy.clip_norm is None or c.privacy.noise_multiplier == 0:
        return
    sampler, data, law = c.clients.sampler.component, c.samples.sampler.component, c.clients.availability.component
    size, why = c.samples.size, "for which no ε holds. With privacy.noise_multiplier"
    drawn_by = DRAWN_BY.get(sampler.name, "what it sees of their data")
    rule = f'samples.sampler = "{data.name}"'
    yield (
        bool(drawn_by),
        f'clients.sampler = "{sampler.name}" {"may draw" if sampler.foreign else "draws"} clients by {drawn_by}: one '
        f'client changes which others are selected, {why} set it to "uniform" or "all"',
    )
    yield (
        law.foreign,
        f'clients.availability = "{law.name}" sees the data of all clients, so that one may change which others are '
        f"there, {why} choose a built-in model",
    )
    yield (
        data.name == "exact" or (data.name == "bernoulli" and size.estimate == "exact"),
        f"{rule} makes the samples that one client uses depend on the exact sizes of the others, {why} set "
        'samples.sampler = "all" or "ratio", or "bernoulli" with a private samples.size.estimate',
    )
    yield (
        data.foreign and bool(data.marks.get("pooled")),
        f"{rule} sees the sizes of the whole cohort, so that one client can change the samples of others, {why} set "
        'samples.sampler = "all" or "ratio"',
    )
    yield (
        data.foreign and c.samples.budget is not None,
        f"samples.budget gives {rule} the expected number of samples of a client, its share of the exact size of the "
        f"whole cohort, so that one client can change the samples of others, {why} leave it out, or set "
        'samples.sampler = "bernoulli" with a private samples.size.estimate',
    )
    yield (
        data.name == "bernoulli" and not size.clip,
        f"samples.size.clip = false lets one large client change the share of samples that all others use, {why} leave "
        "it true",
    )
    yield (
        c.rebalance is not None,
        "rebalance copies samples by the class counts of all clients together, so that one client changes the others' "
        f"data, {why} switch it off",
    )


def _task(c: ConfigTables) -> Checks:
    """Losses and metrics of other kinds of tasks, and components that need one class per sample."""
    kind, named = KINDS[c.task.kind], f'task.kind = "{c.task.kind}"'
    for chosen in (c.task.loss, *c.task.metrics):
        reason = kind.refusal(chosen.component)
        yield reason is not None, reason or ""
    if kind.score != "accuracy":
        yield (
            c.evaluation.target_accuracy is not None,
            f"evaluation.target_accuracy has no effect with {named}, which has no accuracy: remove it",
        )
        yield (
            "accuracy" in {*_needs(c), *_measures(c)},
            f'clients.sampler = "{c.clients.sampler.name}" draws clients by their accuracy, which {named} lacks',
        )
    if c.task.kind not in NO_CLASS:
        return
    scheduling = c.topology.scheduling.name if isinstance(c.topology, Mediators) else "random"
    for broken, what in (
        (
            "strata" in _needs(c) and stratification(c).features.name == "label-histogram",
            'clients.sampler.features = "label-histogram" makes strata of the clients\' class counts',
        ),
        (c.rebalance is not None, "rebalance copies the samples of scarce classes (Astraea's augmentation)"),
        (
            scheduling != "random",
            f'topology.scheduling = "{scheduling}" groups clients by their class counts (Astraea)',
        ),
        (_mediators(c), 'topology = "mediators" records the class counts of its groups'),
        (c.attack.name == "label-flip", 'attack = "label-flip" turns class y into C - 1 - y'),
        (
            c.clients.availability.name == "label-group",
            'clients.availability = "label-group" depends on the most frequent class of a client',
        ),
    ):
        yield broken, f"{what}, but with {named} {NO_CLASS[c.task.kind]}"


def _algorithm(c: ConfigTables) -> Checks:
    """Choices that contradict what the local algorithm declares."""
    found = local_algorithm(c)
    if found is None:
        return
    part, algorithm = found
    name = f'local.algorithm = "{part.name}"'
    sends = bool(algorithm.sums or algorithm.numbers)
    carries, more = sends or bool(algorithm.client_state), f"{name} keeps or sends more than the update"
    yield (
        _mediators(c),
        f'{name} needs each client\'s own update, which topology = "mediators" never forms: choose a star',
    )
    yield (
        stratification(c).initial_step,
        f"{name} needs whole rounds, but clients.sampler.initial_step makes round 0 a single step: switch it off",
    )
    yield (
        carries and c.privacy.clip_norm is not None,
        f"{more}, which privacy.clip_norm does not bound: no ε would hold",
    )
    yield (
        carries and c.compression.name != "none",
        f"{more}, which compression does not compress: what clients keep would differ from what arrives; set "
        'compression = "none"',
    )
    yield (
        sends and c.server.aggregator.name != "mean",
        f'{name} sends more than the update, which server.aggregator does not combine: set server.aggregator = "mean"',
    )
    yield (
        sends and c.attack.name in ("sign-flip", "noise"),
        f'{name} sends more than the update, but attack = "{c.attack.name}" changes only the update. Set '
        'attack = "label-flip": its attackers train on wrong labels',
    )


def _refused_by_components(c: ConfigTables) -> Checks:
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
        yield bool(reason), f'{key} = "{part.name}" is not possible here: {reason}'


def _needs(c: ConfigTables) -> tuple[str, ...]:
    """Return what the client sampler needs of the server."""
    needs: tuple[str, ...] = c.clients.sampler.component.marks.get("needs", ())
    return needs


def _measures(c: ConfigTables) -> tuple[str, ...]:
    """Return what is measured for the client sampler's candidates."""
    measures: tuple[str, ...] = c.clients.sampler.component.marks.get("measures", ())
    return measures


def _mediators(c: ConfigTables) -> bool:
    return c.topology.name == "mediators"


def _merged(c: ConfigTables) -> bool:
    return c.local.engine == "merged"


def _last_rate(c: ConfigTables) -> float:
    """Return the learning rate of the last round of the step schedule, infinite beyond floats; else local.lr."""
    schedule = c.local.schedule
    if schedule.name != "step":
        return c.local.lr
    with suppress(OverflowError):
        return float(c.local.lr * schedule.options["factor"] ** ((c.rounds - 1) // schedule.options["every"]))
    return math.inf
