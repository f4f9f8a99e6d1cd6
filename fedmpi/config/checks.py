"""Contradictions between the values of a configuration: rows of a condition, the keys that meet, and the reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedmpi.common.calling import calling
from fedmpi.common.decorators import MEASURABLE, TRANSFERS, UPDATES
from fedmpi.common.options import in_toml
from fedmpi.common.task_kinds import KINDS, kinds_of
from fedmpi.config.keys import components_of, entries
from fedmpi.config.tables import copies_of, local_algorithm, of_labels, stratification

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

Rows = Iterator[tuple[bool, str, str]]
"""True if values contradict each other; the keys of these values; the reason with the way out."""
DRAWN_BY_SIZE = ("weighted", "clustered-md", "power-of-choice")
CALLED_THEMSELVES = ("model", "local optimizer", "data source")
"""Kinds that call the chosen object itself. No instance exists that could reject a configuration."""
BY_DESIGN = ("stratified", "normalized", "unbiased")
"""Weights that divide by the probability to be selected in a round."""
APART = "the clients of a step have received different models"
KEPT_STATE = "it changes values that clients keep or send, and updates train out of their order"
INDEPENDENT = ("all", "uniform", "shuffled")
"""Samplers whose draws do not depend on the clients' data."""
NO_CLASS = {
    "tokens": "a sample of tokens has a target at every position and no class of its own",
    "multilabel": "a sample may have several labels and no class of its own",
    "regression": "a sample has numbers for targets and no class",
}
CHOSEN_LATE = (
    "arrival times must be known before training, and they depend on the samples that this data sampler chooses during "
    "training"
)
TWICE = "they say the same in two ways. Keep one of them"


def contradiction(c: ConfigTables) -> str | None:
    """Return the reason why the chosen values cannot be combined, or None."""
    rounds = _selection, _measured, _ranks, _own_updates, _by_step, _sums, _private
    for group in (_asynchronous, *rounds, _task, _algorithm, _personal, _components):
        for broken, keys, reason in group(c):
            if broken:
                return f"{' does not go with '.join(_given(c, key) for key in keys.split())}: {reason}"
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
    """Numbers that samplers need, and options that conflict with the cohort of all clients or with mediators."""
    everybody, invites = c.clients.sampler.name == "all", c.clients.over_selection > 1
    chosen = c.clients.count, c.clients.fraction
    unset = not everybody and chosen == (None, None) and c.topology.name != "async"
    yield unset, "clients.sampler", "set clients.count or clients.fraction, the clients of a round"
    yield None not in chosen, "clients.count clients.fraction", TWICE
    yield None not in (c.local.epochs, c.local.steps), "local.epochs local.steps", TWICE
    unset = c.samples.sampler.name in ("bernoulli", "exact") and c.samples.budget is None
    yield unset, "samples.sampler", "set samples.budget, the number K of samples per round"
    yield (
        c.topology.name == "mediators" and c.topology.regroup == "once" and not everybody,
        "topology.regroup clients.sampler",
        'hardly two clients of a group are drawn together. Set clients.sampler = "all" or topology.regroup = '
        '"every-round"',
    )
    yield invites and everybody, "clients.over_selection clients.sampler", "all clients are invited already"
    yield invites and _mediators(c), "clients.over_selection topology", "only mediators send to the server"


def _measured(c: ConfigTables) -> Rows:
    """Numbers that samplers draw by, and that nothing measures in time."""
    sampler, data, needs, measures = c.clients.sampler, c.samples.sampler, _needs(c), _needs(c, "measures")
    by_norm = "norms" in needs or sampler.options.get("within_stratum") == "importance"
    yield (
        by_norm and of_labels(c),
        "clients.sampler clients.sampler.features",
        "importance draws need the norms of gradients. Choose other features, or set clients.sampler.within_stratum = "
        '"uniform"',
    )
    late, invites = c.devices is not None and counts_late(c), c.clients.over_selection > 1
    yield late and invites, "clients.over_selection samples.sampler", f"{CHOSEN_LATE}. Set clients.over_selection = 1"
    for key, times in _times(c).items():
        yield times and late, f"{key} samples.sampler", f'{CHOSEN_LATE}. Set samples.sampler = "all"'
        yield times and _mediators(c), f"{key} topology", "with mediators, the time of single clients is not counted"
    yield _leaves(c) and c.devices is None, "clients.availability", "it follows simulated time. Set devices = true"
    timed = bool({"seconds", *TRANSFERS} & {*needs, *measures}) and c.devices is None
    yield timed, "clients.sampler", "it draws by seconds, which only simulated time counts. Set devices = true"
    yield (
        "seconds" in measures and (late or data.name == "exact" or c.samples.size.query == "selected"),
        "clients.sampler samples.sampler",
        "candidates are measured before the clients are drawn, and their samples are chosen after that. Set "
        'samples.sampler = "all", or draw by past numbers, needs = ("seconds",)',
    )
    trains, algorithm = bool({*measures} & {*UPDATES}), local_algorithm(c)
    once = "candidates train only to be measured, and train again if they are selected"
    keeps = algorithm is not None and _keeps(algorithm[1])
    yield trains and keeps, "clients.sampler local.algorithm", f"{once}. This algorithm would count both"
    yield (
        trains and bool(c.compression.values.get("error_feedback")),
        "clients.sampler compression.error_feedback",
        f"{once}. Both updates would change the residual",
    )
    yield (
        trains and data.name != "all" and (bool(data.marks.get("pooled")) or c.samples.budget is not None),
        "clients.sampler samples.sampler",
        f'{once}. These samples depend on the other selected clients. Set samples.sampler = "all"',
    )


def _asynchronous(c: ConfigTables) -> Rows:
    """Choices that need a round in which all clients receive the same model."""
    if c.topology.name != "async":
        return
    yield c.devices is None, "topology", "simulated time orders the updates. Set devices = true"
    yield None not in (c.topology.buffer, c.topology.period), "topology.buffer topology.period", TWICE
    needs, measures, weights, algorithm = {*_needs(c)}, _needs(c, "measures"), c.server.weights, local_algorithm(c)
    learns = _learns(c) or weights.name in BY_DESIGN or bool(weights.marks.get("averages_models"))
    for key, broken, reason in (
        ("clients.sampler", c.clients.sampler.name == "all", 'it leaves no place free. Choose "uniform"'),
        ("clients.sampler", c.clients.sampler.name == "shuffled", "its epochs have rounds of equal cohorts"),
        ("clients.sampler", bool(measures or needs - {"history", "seconds"}), f"it measures clients, and {APART}"),
        ("clients.over_selection", c.clients.over_selection > 1, "no round ends before all updates have arrived"),
        ("devices.late", getattr(c.devices, "late", "lost") == "partial", "clients take all their steps"),
        ("samples.sampler", c.samples.sampler.name != "all", 'arrival times depend on its draws. Choose "all"'),
        ("server.weights", learns, f'{APART}. Set server.weights = "uniform" or "samples"'),
        ("privacy.clip_norm", c.privacy.clip_norm is not None, "no account of ε counts updates of several rounds"),
        ("logging.diagnostics", c.logging.diagnostics, APART),
        ("compression.error_feedback", bool(c.compression.values.get("error_feedback")), KEPT_STATE),
        ("local.algorithm", algorithm is not None and _keeps(algorithm[1]), KEPT_STATE),
        ("local.personal", bool(c.local.personal), KEPT_STATE),
        ("model.copies", copies_of(c) > 1, KEPT_STATE),
    ):
        yield broken, f"topology {key}", reason


def _ranks(c: ConfigTables) -> Rows:
    """Placements of clients on ranks."""
    cluster, keeps = c.cluster, bool(c.compression.values.get("error_feedback"))
    place, topology = cluster.placement, "cluster.placement topology"
    yield place == "mediator" and not _mediators(c), topology, "there are no mediators"
    yield place == "shared" and _mediators(c), topology, 'choose "owner" or "mediator"'
    always = cluster.server_trains == "always"
    yield always and _mediators(c), "cluster.server_trains topology", "rank 0 trains no groups"
    for key, moves in (("placement", place == "shared"), ("balance", cluster.balance == "measured")):
        owned = "a client's residual stays where its data is. Switch one of them off"
        yield keeps and moves, f"cluster.{key} compression.error_feedback", owned


def _own_updates(c: ConfigTables) -> Rows:
    """Choices that need each client's own update where none is formed."""
    for key, needs in {
        "privacy.clip_norm": c.privacy.clip_norm is not None,
        "logging.diagnostics": c.logging.diagnostics,
        "compression": c.compression.name != "none",
        "server.aggregator": c.server.aggregator.name != "mean",
        "server.weights": _learns(c),
        "attack": attacks_updates(c),
        "clients.sampler": bool({*_needs(c), *_needs(c, "measures")} & {*UPDATES}),
        "local.algorithm": local_algorithm(c) is not None,
    }.items():
        yield needs and _mediators(c), f"{key} topology", "each client's own update is needed, and none is formed"


def _by_step(c: ConfigTables) -> Rows:
    """Choices that need one learning rate for all steps of a round."""
    by_step, algorithm = c.local.schedule_unit == "step", local_algorithm(c)
    for key, needs in {
        "topology": _mediators(c),
        "server.weights": _learns(c),
        "local.algorithm": algorithm is not None and (not algorithm[0].foreign or algorithm[1].train is not None),
    }.items():
        yield by_step and needs, f"local.schedule_unit {key}", 'it needs one learning rate per round. Set "round"'


def _sums(c: ConfigTables) -> Rows:
    """Weights that cannot be formed, and choices that need a weighted sum where something else is formed."""
    combines, clips, weights = c.server.aggregator.name != "mean", c.privacy.clip_norm is not None, c.server.weights
    law, both = c.clients.availability, "server.aggregator server.weights"
    lowest = min(law.options["by_label"]) if law.name == "label-group" else 1.0
    strata = weights.name != "stratified" or "strata" in _needs(c)
    yield not strata, "server.weights clients.sampler", 'set clients.sampler = "stratified"'
    for key in ("devices.deadline", "clients.availability"):
        yield (
            weights.name == "unbiased" and _times(c)[key],
            f"server.weights {key}",
            "the probability that a client's update arrives in time is unknown, and some never do. Set server.weights "
            '= "normalized"',
        )
    yield (
        weights.name == "unbiased" and lowest == 0,
        "server.weights clients.availability",
        "some clients are never available, and weights divide by their probability. Raise it, or set server.weights = "
        '"normalized"',
    )
    yield (
        clips and weights.name != "uniform",
        "privacy.clip_norm server.weights",
        "what one client sends is bounded before these weights multiply it by numbers of its data. Set "
        'server.weights = "uniform"',
    )
    yield clips and combines, "privacy.clip_norm server.aggregator", "only the mean is a sum of bounded updates"
    yield combines and bool(weights.marks.get("averages_models")), both, "these weights average models"
    yield combines and _learns(c), both, "these weights divide a sum by what they learn from the updates"
    diagnosed = c.logging.diagnostics and _learns(c)
    yield diagnosed, "logging.diagnostics server.weights", "diagnostics weigh updates before these weights change"


def _private(c: ConfigTables) -> Rows:
    """Choices under which one client's data changes more than its own update, so that no ε would hold."""
    if c.privacy.clip_norm is None or c.privacy.noise_multiplier == 0:
        return
    data, size, present = c.samples.sampler, c.samples.size, c.clients.availability
    sizes = 'set samples.sampler = "all" or "ratio", or "bernoulli" with a private samples.size.estimate'
    bernoulli, by_size = data.name == "bernoulli", "the samples of others by its size"
    tree, adapts = c.privacy.noise == "tree", c.privacy.adaptive_clip is not None
    again = 'a client may be selected only once per tree. Set clients.sampler = "shuffled"'
    yield tree and c.clients.sampler.name != "shuffled", "privacy.noise clients.sampler", again
    yield tree and c.clients.over_selection > 1, "privacy.noise clients.over_selection", "epochs are fixed. Set it to 1"
    yield tree and adapts, "privacy.noise privacy.adaptive_clip", "nodes of a tree need one clipping norm"
    balanced = c.task.loss.options.get("class_weights") == "balanced"
    pooled, shared = data.foreign and bool(data.marks.get("pooled")), not data.marks.get("pooled")
    for key, broken, changes, advice in (
        ("clients.sampler", c.clients.sampler.name not in INDEPENDENT, "which others are selected", 'set "uniform"'),
        ("clients.availability", present.foreign or _leaves(c), "which others are available", 'set "bernoulli"'),
        ("samples.sampler", data.name == "exact", by_size, sizes),
        ("samples.size.estimate", bernoulli and size.estimate == "exact", by_size, sizes),
        ("samples.size.clip", bernoulli and not size.clip, "the share of samples of others", "leave it true"),
        ("samples.sampler", pooled, "the samples of others", sizes),
        ("samples.budget", shared and c.samples.budget is not None, "the samples of others", "leave it out"),
        ("rebalance", c.rebalance is not None, "the copies of others' samples", "switch it off"),
        ("task.loss.class_weights", balanced, "the class weights of others", "give numbers"),
    ):
        reason = f"one client may change {changes}, and no ε holds: {advice}"
        yield broken, f"{key} privacy.noise_multiplier", reason


def _task(c: ConfigTables) -> Rows:
    """Losses and metrics of other kinds of tasks, and components that need one class per sample."""
    kind = KINDS[c.task.kind]
    for key, chosen in (("task.loss", c.task.loss), *(("task.metrics", metric) for metric in c.task.metrics)):
        suits = " or ".join(kinds_of(chosen))
        yield not kind.fits(chosen), "task.kind", f'{key} = "{chosen.name}" is for {suits}'
    weighs = bool(c.task.loss.options.get("class_weights"))
    yield weighs and kind.name != "classification", "task.loss.class_weights task.kind", "it weighs classes of samples"
    no_accuracy, numbers = kind.score != "accuracy", {*_needs(c), *_needs(c, "measures")}
    by_accuracy = bool(numbers & {"accuracy", "val_accuracy"})
    aims = c.evaluation.target_accuracy is not None
    yield no_accuracy and aims, "evaluation.target_accuracy task.kind", "it has no accuracy"
    yield no_accuracy and by_accuracy, "clients.sampler task.kind", "it has no accuracy"
    reason = NO_CLASS.get(kind.name)
    for key, by_class in {
        "clients.sampler.features": "strata" in _needs(c) and of_labels(c),
        "rebalance": c.rebalance is not None,
        "topology": _mediators(c),
        "attack": c.attack.name == "label-flip",
        "clients.availability": c.clients.availability.name == "label-group",
    }.items():
        yield bool(reason) and by_class, f"{key} task.kind", f"classes of samples are needed, but {reason}"


def _algorithm(c: ConfigTables) -> Rows:
    """Choices that contradict what the local algorithm declares."""
    found = local_algorithm(c)
    if found is None:
        return
    sends = bool(found[1].sums or found[1].numbers)
    carries, more = sends or bool(found[1].client_state), "clients keep or send more than their update"
    for key, broken, reason in (
        ("clients.sampler.initial_step", stratification(c).initial_step, "whole rounds are needed"),
        ("privacy.clip_norm", carries and c.privacy.clip_norm is not None, f"{more}, which is not bounded: no ε holds"),
        ("compression", carries and c.compression.name != "none", f"{more}, which is not compressed"),
        ("server.aggregator", sends and c.server.aggregator.name != "mean", f"{more}, which only the mean combines"),
        ("attack", sends and attacks_updates(c), f'{more}. Set attack = "label-flip"'),
    ):
        yield broken, f"local.algorithm {key}", reason


def _personal(c: ConfigTables) -> Rows:
    """Choices that need one model of all clients on the server."""
    key = "model.copies" if copies_of(c) > 1 else "local.personal"
    if key == "model.copies":
        yield from _copies(c)
    elif not c.local.personal:
        return
    needs, measures, found = {*_needs(c)}, {*_needs(c, "measures")}, local_algorithm(c)
    whole = found is not None and found[1].personal_model is not None
    gradients = "norms" in needs or ("strata" in needs and not of_labels(c))
    tried = gradients or (needs | measures) & {*MEASURABLE} or measures & {*UPDATES}
    measured = "clients are measured on one global model, which none of them uses. Choose another one"
    for other, broken, reason in (
        ("topology", _mediators(c), 'the whole model goes from client to client. Set topology = "star"'),
        ("privacy.clip_norm", c.privacy.clip_norm is not None, "clients use more than they send, so no ε holds"),
        ("clients.sampler.initial_step", stratification(c).initial_step, "whole rounds are needed"),
        ("clients.sampler", bool(tried), measured),
        ("local.algorithm", whole, "its personal models are whole models. Leave one of them out"),
        ("samples.sampler", bool(c.samples.sampler.marks.get("needs")), measured),
        ("server.weights", _learns(c), measured),
        ("logging.diagnostics", c.logging.diagnostics, measured),
    ):
        yield broken, f"{key} {other}", reason


def _copies(c: ConfigTables) -> Rows:
    """Choices that concern the whole vector of all copies of the model."""
    mean, normalized = c.server.aggregator.name == "mean", c.server.weights.marks.get("normalized", True)
    for key, broken, reason in (
        ("local.personal", bool(c.local.personal), "both give a client its own model. Keep one of them"),
        ("local.algorithm", local_algorithm(c) is not None, 'copies take plain steps. Set local.algorithm = "plain"'),
        ("model.lora", c.model.given.get("lora") is not None, "all copies would start as the same model"),
        ("compression", c.compression.name != "none", "clients send the values of one copy. Switch one of them off"),
        ("attack", attacks_updates(c), 'attackers would change all copies. Set attack = "label-flip"'),
        ("server.aggregator", not mean, "each copy is the weighted mean of its own clients"),
        ("server.weights", not normalized, "each copy is the weighted mean of its own clients"),
    ):
        yield broken, f"model.copies {key}", reason


def _components(c: ConfigTables) -> Rows:
    """Configurations that a chosen component rejects by its method `refuses(config)`."""
    for key, chosen in components_of(c):
        if chosen.is_component and chosen.kind not in CALLED_THEMSELVES:
            made = chosen.object
            with calling(chosen):
                judge = chosen.make() if inspect.isclass(made) and hasattr(made, "refuses") else made
                reason = judge.refuses(c) if hasattr(judge, "refuses") else None
            yield bool(reason), key, f"it rejects the other choices: {reason}"


def _needs(c: ConfigTables, mark: str = "needs") -> tuple[str, ...]:
    """Return what the client sampler needs of the server, or what it "measures" of its candidates."""
    needs: tuple[str, ...] = c.clients.sampler.marks.get(mark, ())
    return needs


def _keeps(algorithm: Any) -> bool:
    """Check whether a local algorithm keeps or sums values besides the update."""
    return bool(algorithm.client_state or algorithm.server_state or algorithm.sums or algorithm.numbers)


def _learns(c: ConfigTables) -> bool:
    """Check whether weights depend on the result of the clients' work."""
    return hasattr(c.server.weights.object, "after")


def counts_late(c: ConfigTables) -> bool:
    """Check whether only the workers know, once they train, how many samples each client uses."""
    sampler = c.samples.sampler
    return bool(sampler.foreign or not sampler.marks.get("pooled"))


def _leaves(c: ConfigTables) -> bool:
    """Check whether clients come and go in simulated time."""
    return hasattr(c.clients.availability.object, "until")


def _times(c: ConfigTables) -> dict[str, bool]:
    """Return whether each key is set that needs the simulated time of single clients."""
    device = {f"devices.{key}": getattr(c.devices, key, None) is not None for key in ("deadline", "power")}
    return device | {"clients.availability": _leaves(c)}


def attacks_updates(c: ConfigTables) -> bool:
    """Check whether attackers send other updates than they have trained, and not only train on other labels."""
    return c.attack.name != "none" and not hasattr(c.attack.object, "labels")


def _mediators(c: ConfigTables) -> bool:
    return c.topology.name == "mediators"
