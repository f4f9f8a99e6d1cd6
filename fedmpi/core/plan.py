"""Plan of a round on rank 0: the selected clients, the data they use, and their aggregation weights.

All random numbers come from streams keyed by the round, so a plan depends on the configuration, the seed and the
clients' sizes, never on the number of ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedmpi.aggregation.weights import Weighing
from fedmpi.clients.cohort import Cohort
from fedmpi.clients.strata import Strata
from fedmpi.clients.turnout import CohortDraw, Turnout, opens_with_a_step
from fedmpi.common.errors import UserError
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.checks import weighs_twice
from fedmpi.config.tables import Mediators, local_algorithm
from fedmpi.core.accounts import Accounts
from fedmpi.local.optimizers import rate_at
from fedmpi.mediators.groups import MediatorGroups
from fedmpi.privacy.sizes import SizeEstimate, answer_stream, estimate_total, sampling_probability, saturations
from fedmpi.privacy.updates import planned_participants
from fedmpi.samples.rules import RowRule

log = logging.getLogger("fedmpi")

PLANNED = {"steps": "steps", "lr": "rates", "budget": "budgets"}
"""Fields of a plan, by the fields of a cohort that set the work of each client."""


def rate_of(config: Config, t: int) -> float:
    """Return the local learning rate of round t, to which a schedule of steps is applied by the workers."""
    part = config.local
    return part.lr if part.schedule_unit == "step" else rate_at(part, part.lr, t, config.rounds)


@dataclass(frozen=True)
class Draft:
    """Draft of a round: the plan with the facts of its mediators, and the inputs of the other facts."""

    plan: Plan
    turnout: Turnout
    estimate: SizeEstimate | None  # Size estimate from which the probability follows, if there is one
    queried: Ints | None  # (a,): Clients that answered the size query; None for all


class Planner:
    """Planner of the rounds of a run."""

    def __init__(
        self,
        config: Config,
        sizes: Ints,
        streams: Streams,
        cohorts: CohortDraw,
        groups: MediatorGroups | None = None,
        weight_sizes: Ints | None = None,
    ):
        self.config = config
        self.sizes = sizes
        self.weight_sizes = sizes if weight_sizes is None else weight_sizes
        self.streams = streams
        self.cohorts = cohorts
        self.groups = groups
        self.accounts = Accounts(config, sizes, cohorts.bytes_down, cohorts.bytes_up)
        self.row_rule = RowRule(config.samples.sampler, config.samples.sampler.options, streams, config.samples.budget)
        self.weighing = Weighing(config.server.weights, config.server.weights.options, len(sizes))
        algorithm = local_algorithm(config)
        self.counts_once = algorithm is not None and bool(getattr(algorithm[1], "counts_once", False))
        self.turnout: Turnout | None = None  # of the latest plan
        self.seconds: Floats | None = None
        self._warned: set[str] = set()
        self._drafts: dict[int, Draft] = {}

    def prepare(self, t: int, strata: Strata | None = None) -> None:
        """Draft a coming round in advance, so that `plan` only has to add it to the accounts."""
        if t < self.config.rounds and t not in self._drafts:
            self._drafts[t] = self._draft(t, strata)

    def plan(self, t: int, strata: Strata | None = None) -> Plan:
        """Return the plan of round t, drawn from the current strata if it needs any."""
        draft = self._drafts.pop(t, None) or self._draft(t, strata)
        self.turnout, self.seconds = draft.turnout, draft.turnout.seconds
        if self.cohorts.past is not None:
            self.cohorts.past.enter(t, draft.turnout.asked, draft.turnout.cohort.clients)
        facts = self._facts(draft) | draft.plan.facts
        self.cohorts.clock += facts.get("virtual_seconds", 0.0)
        return replace(draft.plan, facts=facts)

    def add_seconds(self, plan: Plan, clients: Ints, used: Ints) -> None:
        """Compute the simulated seconds of a round in which these clients (q,) used so many samples (q,)."""
        counts = np.zeros(len(plan.clients), np.int64)
        counts[np.searchsorted(plan.clients, clients)] = used
        self.seconds = self.cohorts.seconds_of(plan.clients, counts, plan.steps if len(plan.steps) else None)
        plan.facts["virtual_seconds"] = self._round_seconds(self.seconds, plan.mediators)
        self.cohorts.clock += plan.facts["virtual_seconds"]

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state."""
        return self.accounts.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the state of a checkpoint; raise KeyError if a part is missing."""
        self.accounts.load(state)

    def trial(self, t: int, candidates: Ints) -> Plan:
        """Return the plan of training the candidates of round t that a sampler measures."""
        return Plan(t, rate_of(self.config, t), candidates, np.ones(len(candidates)), 0, normalize=False)

    def _draft(self, t: int, strata: Strata | None) -> Draft:
        clips = self.config.privacy.clip_norm is not None
        turnout = self.cohorts.draw(t, strata)
        cohort = turnout.cohort
        opening = opens_with_a_step(self.config, t)
        probability, estimate, queried = (1.0, None, np.empty(0, np.int64)) if opening else self._sampled(t, turnout)
        weighing = self._opening_weights() if opening else self.weighing
        self._check_draw(t, cohort, opening)
        mediators, divergences = self.groups.group(t, cohort.clients) if self.groups else (np.empty(0, np.int64), {})
        made = {"strata": len(strata.sizes), "stratum_sizes": strata.sizes.tolist()} if opening and strata else {}
        if clips:  # 1/W, independent of drop-outs (see `private_updates`)
            clients = len(self.sizes)
            coefficients = cohort.multiplicity / (clients if opening else planned_participants(self.config, clients))
        else:
            coefficients = self._coefficients(weighing, t, cohort)
        plan = Plan(
            round=t,
            lr=rate_of(self.config, t),
            clients=cohort.clients,
            coefficients=coefficients,
            per_sample=weighing.per_sample,
            normalize=weighing.normalizes and not clips,
            probability=probability,
            mediators=mediators,
            one_step=opening,
            **{PLANNED[name]: values for name, values in cohort.own_work.items()},
            facts=made | divergences,
        )
        return Draft(plan, turnout, estimate, queried)

    def _check_draw(self, t: int, cohort: Cohort, opening: bool) -> None:
        """Reject a cohort that the local algorithm does not support; warn if sizes count twice."""
        if not opening and (warning := weighs_twice(self.config)) is not None:
            self._warn_once("weights", t, warning)
        if cohort.own_work:
            self._check_work(cohort)
        if not self.counts_once:
            return
        twice, sampler = cohort.clients[cohort.multiplicity > 1], self.cohorts.sampler
        if len(twice):
            raise UserError(
                f'local.algorithm = "{self.config.local.algorithm.name}" counts every participant once, but '
                f'clients.sampler = "{sampler.part.name}" drew client {twice[0]} more than once in '
                f"round {t}. Draw clients without replacement"
            )

    def _check_work(self, cohort: Cohort) -> None:
        """Reject work per client if another choice needs equal work, or chooses the samples of all clients together."""
        config, names = self.config, [*cohort.own_work]
        if config.devices is not None and config.devices.late == "partial":
            names = [name for name in names if name != "steps"]  # set by the deadline
        if not names:
            return
        pooled, algorithm = self.row_rule.pooled and not self.row_rule.uses_all, config.local.algorithm.name
        weights = config.server.weights
        one_rate = weights.name == "q-ffl" and weights.options["lipschitz"] is None  # L = 1 / lr of all clients
        for unfit, sets, key in (
            (config.privacy.clip_norm is not None, names, "privacy.clip_norm"),
            (self.accounts.ledger is not None, names, f'samples.size.estimate = "{config.samples.size.estimate}"'),
            (config.topology.name != "star", names, f'topology = "{config.topology.name}"'),
            ("budget" in names and pooled, ["budget"], f'samples.sampler = "{config.samples.sampler.name}"'),
            ("lr" in names and algorithm == "fednova", ["lr"], 'local.algorithm = "fednova"'),
            ("lr" in names and one_rate, ["lr"], 'server.weights = "q-ffl" without server.weights.lipschitz'),
        ):
            if unfit:
                raise UserError(
                    f'clients.sampler = "{config.clients.sampler.name}" sets {" and ".join(sets)} in its Cohort, '
                    f"which {key} does not support"
                )

    def _opening_weights(self) -> Weighing:
        """Return the weights of a round with all available clients: Σ ρ_k (FedSSO, Algorithm 1, line 3).

        Weights that correct for unavailable clients do so here too.
        """
        weights = self.config.server.weights
        name = weights.marks.get("opening")
        if not name:
            return self.weighing
        part = resolve("weights", name)
        population = weights.options.get("population", "clients")
        return Weighing(part, {"population": population} if "population" in part.fields else {})

    def _sampled(self, t: int, turnout: Turnout) -> tuple[float, SizeEstimate | None, Ints | None]:
        """Return the probability with which samples are used, the size estimate used for it, and who was queried.

        p = K/Ñ for an estimate (FedSampling, Eq 2), the fixed ratio for the naive rule, K over the samples of all
        available clients for a custom pooled sampler, 1 otherwise. The size query goes to all available clients
        (FedSampling), or to those that receive the model (FedSTaS), which answer before some of them drop out.
        """
        part, kind = self.config.samples, self.row_rule.probability
        if kind == "ratio":
            return part.sampler.options["ratio"], None, None
        if kind == "budget" and part.budget is not None:
            sizes = self.sizes if isinstance(turnout.present, int) else self.sizes[turnout.present]
            return sampling_probability(part.budget, int(sizes.sum())), None, None
        if kind != "estimate":
            return 1.0, None, None
        assert part.budget is not None
        table = part.size
        queried = turnout.asked if table.query == "selected" else turnout.present
        asked = None if isinstance(queried, int) else queried
        answers = answer_stream(self.streams, t, table.reuse_reports)
        size = estimate_total(table.estimate, self.sizes, table.epsilon, table.max_size, answers, table.clip, asked)
        for warning, message in saturations(size, part.budget, table.max_size).items():
            self._warn_once(warning, t, message)
        return sampling_probability(part.budget, size.total), size, asked

    def _coefficients(self, weighing: Weighing, t: int, cohort: Cohort) -> Floats:
        """Return the raw coefficients; for weights that count samples, the factor of one sample."""
        sizes = self.sizes[cohort.clients]
        budget = self.config.samples.budget if cohort.budget is None else int(np.minimum(sizes, cohort.budget).sum())
        wanted = budget or max(1, int(sizes.sum()))
        return weighing.of(replace(cohort, wanted=wanted), self.weight_sizes, t)

    def _facts(self, draft: Draft) -> dict[str, Any]:
        plan, turnout, estimate = draft.plan, draft.turnout, draft.estimate
        cohort, clients = turnout.cohort, self.config.clients
        facts: dict[str, Any] = {"participants": len(cohort.clients)}
        facts |= {f"sampler_{name}": float(value) for name, value in cohort.numbers.items()}
        if plan.one_step:
            facts["opening"] = True
        if clients.availability.name != "always":
            facts["available"] = turnout.available
        if clients.failure_rate or clients.over_selection > 1 or {"late", "departed"} & turnout.facts.keys():
            facts["asked"] = len(turnout.asked)
        facts |= turnout.facts
        if self.cohorts.sampler.measures:
            facts["candidates"] = len(turnout.candidates)
        if turnout.seconds is not None:
            facts["virtual_seconds"] = max(self._round_seconds(turnout.seconds, plan.mediators), turnout.waits)
        if turnout.joules is not None:
            facts["joules"] = float(turnout.joules.sum())
        if (strata := cohort.strata) is not None:
            facts["strata"] = len(strata.sizes)
            facts["stratum_sizes"] = strata.sizes.tolist()
            facts["allocation"] = strata.draws.tolist()
        if self.row_rule.probability in ("estimate", "ratio") and not plan.one_step:
            facts["sampling_probability"] = plan.probability
        if estimate is not None:
            facts["size_estimate"] = estimate.total
            facts["size_true"] = estimate.true_total
            facts["size_asked"] = estimate.asked
            facts["clipped_fraction"] = estimate.clipped_fraction
        if self.accounts.usage is not None:
            facts |= self._diagnosed(cohort)
        if (exposure := self.accounts.exposure) is not None:
            self._warn_once("exposure", plan.round, exposure.message)
        return facts | self.accounts.enter(turnout, draft.queried)

    def _round_seconds(self, seconds: Floats, mediators: Ints) -> float:
        """Return the length of the round: that of the slowest client, or of the slowest mediator's chain of visits."""
        if not len(mediators):
            return float(seconds.max(initial=0.0))
        chains = np.bincount(mediators, weights=seconds)
        assert isinstance(self.config.topology, Mediators)
        return self.config.topology.epochs * float(chains.max(initial=0.0))

    def _diagnosed(self, cohort: Cohort) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if cohort.inclusion is not None and cohort.inclusion.size:
            facts["inclusion_min"] = float(cohort.inclusion.min())
            facts["inclusion_mean"] = float(cohort.inclusion.mean())
            facts["inclusion_max"] = float(cohort.inclusion.max())
        if (strata := cohort.strata) is not None and strata.spread.any():
            facts["stratum_spreads"] = strata.spread.tolist()
        return facts

    def _warn_once(self, kind: str, t: int, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("round %d: %s (said once)", t, message)
