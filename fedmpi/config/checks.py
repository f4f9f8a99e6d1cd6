"""Which choices contradict each other: those of different tables; within a table `Table.refusal` says it."""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import BaseModel

from fedmpi.common.calling import calling, refuse_result, takes
from fedmpi.common.errors import shown
from fedmpi.config.choices import chosen, chosen_in, options_of_part
from fedmpi.config.local_algorithm import algorithm_refusals
from fedmpi.config.objects import CALLED_THEMSELVES
from fedmpi.config.task_checks import task_refusals
from fedmpi.config.update_privacy import privacy_refusals

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables


def _needs(c: ConfigTables) -> tuple[str, ...]:
    """What the client sampler needs of the server."""
    needs: tuple[str, ...] = chosen(c, "client sampler").marks.get("needs", ())
    return needs


def _numbers(c: ConfigTables) -> set[str]:
    """What the client sampler draws by: numbers of past rounds, and of its candidates in this one."""
    return {*_needs(c), *_measures(c)}


def _measures(c: ConfigTables) -> tuple[str, ...]:
    """What the client sampler has measured of its candidates."""
    measures: tuple[str, ...] = chosen(c, "client sampler").marks.get("measures", ())
    return measures


def _strata(c: ConfigTables) -> bool:
    return "strata" in _needs(c)


def _mediators(c: ConfigTables) -> bool:
    return c.topology.kind == "mediators"


def _compressed_updates(c: ConfigTables) -> bool:
    return c.transport.kind != "float32"


def _may_never_come(c: ConfigTables) -> bool:
    lowest = {"time-of-day": c.system.lowest, "label-group": min(c.system.by_label, default=1.0)}
    return lowest.get(c.system.availability, 1.0) == 0


_DRAWN_BY_SIZE = ("weighted", "clustered-md", "power-of-choice")
SMALLEST_RATE, LARGEST_RATE = 1e-30, 1e30


def weighs_twice(c: ConfigTables) -> str | None:
    """A warning where sizes both draw the clients and weigh their updates, or None."""
    if c.participation.clients not in _DRAWN_BY_SIZE or c.aggregation.weights != "samples":
        return None
    return (
        f'participation.clients = "{c.participation.clients}" draws clients by their n_k, and aggregation.weights = '
        '"samples" multiplies by n_k again, so that a client counts as n_k² on average: the papers weigh each draw '
        'alike, aggregation.weights = "uniform"'
    )


def contradiction(c: ConfigTables) -> str | None:
    """The reason why the chosen values of several tables cannot go together, or None."""
    for broken, reason in _contradictions(c):
        if broken:
            return reason
    return None


def _contradictions(c: ConfigTables) -> list[tuple[bool, str]]:
    """Whether each of them is there, with the reason, in the order in which they are told."""
    return [
        *_local_steps(c),
        *_weights(c),
        *_who_works(c),
        *_own_updates(c),
        *_numbers_of_clients(c),
        *_not_summed(c),
        *privacy_refusals(c),
        *task_refusals(c),
        *algorithm_refusals(c),
        *_refused_by_parts(c),
    ]


def _local_steps(c: ConfigTables) -> list[tuple[bool, str]]:
    """Local steps that leave single precision, or that one merged gradient cannot stand for."""
    loc, merged = c.local, c.local.engine == "merged"
    return [
        (
            not SMALLEST_RATE <= _last_rate(c) <= LARGEST_RATE,
            f"local.lr = {loc.lr:g} times local.lr_factor = {loc.lr_factor:g} every {loc.lr_every} of {c.rounds} "
            "rounds leaves what single precision can hold: choose a factor nearer 1, or a larger local.lr_every",
        ),
        (
            merged and (loc.optimizer != "sgd" or _mediators(c)),
            'local.engine = "merged" takes one SGD step from the same model: it needs local.optimizer = "sgd", a star',
        ),
        (
            merged
            and (
                c.aggregation.exact
                or c.privacy.clip_norm is not None
                or c.logging.diagnostics
                or _compressed_updates(c)
            ),
            'local.engine = "merged" never forms a client\'s own update, which aggregation.exact, transport.kind, '
            "privacy.clip_norm and logging.diagnostics need",
        ),
    ]


def _weights(c: ConfigTables) -> list[tuple[bool, str]]:
    """Weights that divide by what the sampler, or the law of availability, cannot give."""
    weights = c.aggregation.weights
    return [
        (
            weights == "stratified" and not _strata(c),
            'aggregation.weights = "stratified" needs participation.clients = "stratified"',
        ),
        (
            weights == "unbiased" and _may_never_come(c),
            'aggregation.weights = "unbiased" divides by the probability of being there, but with system.lowest = 0 or '
            "a 0 in system.by_label some clients are never there: raise it, or set "
            'aggregation.weights = "normalised", which estimates over those who come',
        ),
    ]


def _who_works(c: ConfigTables) -> list[tuple[bool, str]]:
    """Whom the server asks, and which ranks train, where relays or a cohort of all leave no choice."""
    drawn = c.participation.clients != "all"
    return [
        (
            _mediators(c) and c.topology.reschedule == "static" and drawn,
            'topology.reschedule = "static" groups all clients once, of which a drawn cohort would leave hardly two '
            'together: set participation.clients = "all" or topology.reschedule = "every-round"',
        ),
        (
            c.system.over_selection > 1 and not drawn,
            'system.over_selection asks more clients than wanted, but participation.clients = "all" asks all of them',
        ),
        (
            c.system.over_selection > 1 and _mediators(c),
            "system.over_selection takes the first updates to arrive at the server, to which only mediators send with "
            'topology.kind = "mediators"',
        ),
        (
            _mediators(c) and c.server.trains == "always",
            'server.trains = "always" does not go with topology.kind = "mediators": rank 0 runs no relays',
        ),
    ]


def _own_updates(c: ConfigTables) -> list[tuple[bool, str]]:
    """What is done to each client's own update, where none is formed, kept or bounded."""
    weights, clipped = c.aggregation.weights, c.privacy.clip_norm is not None
    return [
        (
            clipped and _mediators(c),
            'privacy.clip_norm needs each client\'s own update, which topology.kind = "mediators" never forms',
        ),
        (
            c.transport.error_feedback and c.topology.placement == "shared",
            'transport.error_feedback keeps a client\'s residual where its data is: set topology.placement = "owner"',
        ),
        (
            _compressed_updates(c) and _mediators(c),
            'transport.kind compresses each client\'s own update, which topology.kind = "mediators" never forms',
        ),
        (
            c.local.on_divergence == "drop" and _mediators(c),
            'local.on_divergence = "drop" leaves out one client\'s update, which topology.kind = "mediators" never '
            'forms: set it to "stop"',
        ),
        (
            c.logging.diagnostics and _mediators(c),
            'logging.diagnostics needs each client\'s own update, which topology.kind = "mediators" never forms',
        ),
        (
            clipped and weights != "uniform",
            "privacy.clip_norm bounds what one client sends, but aggregation.weights = "
            f'"{weights}" multiplies it by what depends on the clients\' data: set aggregation.weights = "uniform"',
        ),
    ]


def _numbers_of_clients(c: ConfigTables) -> list[tuple[bool, str]]:
    """Numbers about clients that samplers and the clock go by, where nobody knows them in time."""
    s, rows = c.samples, chosen(c, "row rule")
    rule, sampler = f'samples.rule = "{rows.name}"', f'participation.clients = "{_sampler(c)}"'
    return [
        (
            c.system.clock and rows.foreign,
            f"system.clock counts the rows of every participant before it trains, which {rule} does not tell: "
            "switch it off, or choose a built-in rule",
        ),
        (
            "seconds" in _numbers(c) and not c.system.clock,
            f"{sampler} draws by the seconds of clients, which nobody counts: set system.clock = true",
        ),
        (
            "seconds" in _measures(c) and (s.rule == "exact" or s.asked == "participants"),
            f"{sampler} measures the seconds of its candidates before it draws, but with "
            f"{rule} a client's rows, and with them its seconds, depend on who is drawn: set "
            'samples.rule = "all", or draw by past seconds, needs = ("seconds",)',
        ),
        (
            "update_norm" in _measures(c) and s.rule != "all",
            f"{sampler} measures the updates of its candidates before it draws, but "
            f"{rule} chooses a client's rows only once the participants are known: set "
            'samples.rule = "all", or draw by past updates, needs = ("update_norm",)',
        ),
        (
            "update_norm" in _numbers(c) and _mediators(c),
            f'{sampler} draws by the norms of the clients\' own updates, which topology.kind = "mediators" never forms',
        ),
        (
            "update_norm" in _needs(c) and c.local.engine == "merged",
            f'{sampler} draws by the norms of the clients\' own updates, which local.engine = "merged" never forms',
        ),
    ]


def _not_summed(c: ConfigTables) -> list[tuple[bool, str]]:
    """Choices that go with a weighted sum of updates, where `aggregation.rule` or the weights make something else."""
    agg, combines = c.aggregation, c.aggregation.rule != "mean"
    rule, weights = f'aggregation.rule = "{agg.rule}"', chosen(c, "weights")
    judged = hasattr(weights.object, "after")
    judging = f'aggregation.weights = "{weights.name}"'
    attack = f'attack.kind = "{c.attack.kind}"'
    needing = rule if combines else judging if judged else attack if c.attack.kind in ("sign-flip", "noise") else ""
    own = "each client's own update"
    return [
        (combines and _mediators(c), f'{rule} needs {own}, which topology.kind = "mediators" never forms'),
        (judged and _mediators(c), f'{judging} needs {own}, which topology.kind = "mediators" never forms'),
        (
            c.attack.kind in ("sign-flip", "noise") and _mediators(c),
            f'{attack} changes {own}, which topology.kind = "mediators" never forms: "label-flip" does go with it',
        ),
        (
            c.local.engine == "merged" and bool(needing),
            f'local.engine = "merged" never forms {own}, which {needing} needs',
        ),
        (
            combines and c.privacy.clip_norm is not None,
            f"privacy.clip_norm bounds what one client adds to a sum, which {rule} does not form: set aggregation.rule "
            '= "mean", or "norm-clip" without privacy.clip_norm',
        ),
        (
            combines and bool(weights.marks.get("averages_models")),
            f"{judging} averages models, and {rule} combines updates: choose other weights",
        ),
        (
            combines and judged,
            f"{judging} divides a sum by what it learns from the updates, and {rule} forms no sum: choose one of them",
        ),
        (
            judged and c.logging.diagnostics,
            f"logging.diagnostics weighs updates as planned, which {judging} changes afterwards: switch it off",
        ),
    ]


def _refused_by_parts(c: ConfigTables) -> list[tuple[bool, str]]:
    """What chosen parts refuse themselves, by a method `refuses(config)`.

    Classes that are called themselves, such as those of torch.optim, are not asked: no object is made of them yet.
    """
    refusals = []
    for part in (part for name, table in c if isinstance(table, BaseModel) for part in chosen_in(c, name)):
        of_class = inspect.isclass(part.object)
        if not hasattr(part.object, "refuses") or (of_class and part.kind in CALLED_THEMSELVES):
            continue
        with calling(part):
            judge = part.make(options_of_part(c, part)) if of_class else part.object
            takes(part, judge.refuses, "config", method="refuses")
            reason = judge.refuses(c)
        if reason is not None and not isinstance(reason, str):
            raise refuse_result(
                part, f"refuses returned {shown(reason, repr)}: return None, or a sentence that says why"
            )
        refusals.append((bool(reason), f'{part.key} = "{part.name}" is not possible here: {reason}'))
    return refusals


def _last_rate(c: ConfigTables) -> float:
    """The learning rate of the last round of the step schedule, infinite where floats end; else local.lr."""
    if c.local.lr_schedule != "step":
        return c.local.lr
    with suppress(OverflowError):
        return float(c.local.lr * c.local.lr_factor ** ((c.rounds - 1) // c.local.lr_every))
    return math.inf


def _sampler(c: ConfigTables) -> str:
    return chosen(c, "client sampler").name
