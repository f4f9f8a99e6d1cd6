"""The server's decisions: who takes part, which share of the data is used, how much each update counts.

Only rank 0 plans. Everything random is drawn from streams keyed by the round, so a plan depends on the configuration,
the seed and the clients' sizes, never on the number of ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedmpi.aggregation.weighing import Weighing
from fedmpi.clients.cohort import Cohort
from fedmpi.clients.devices import round_seconds
from fedmpi.clients.strata import Strata
from fedmpi.clients.turnout import CohortDraw, Turnout
from fedmpi.common.errors import UserError
from fedmpi.common.plan import Plan, learning_rate
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.common.whole_numbers import offsets_of
from fedmpi.config import Config
from fedmpi.config.checks import weighs_twice
from fedmpi.config.choices import chosen, options
from fedmpi.config.local_algorithm import local_algorithm
from fedmpi.core.accounts import Accounts
from fedmpi.mediators.groups import MediatorGroups
from fedmpi.privacy.size_estimates import (
    SizeEstimate,
    answer_stream,
    estimate_total,
    sampling_probability,
    saturations,
)
from fedmpi.privacy.updates import planned_participants
from fedmpi.samples.built_in_rules import used_counts
from fedmpi.samples.row_rule import RowRule

log = logging.getLogger("fedmpi")


def rate_of(config: Config, t: int) -> float:
    """The local learning rate of round t."""
    part = config.local
    return learning_rate(part.lr_schedule, part.lr, t, config.rounds, every=part.lr_every, factor=part.lr_factor)


@dataclass(frozen=True)
class DataSampling:
    """The probability with which a participant's sample is used, and the size estimate it came from, if any.

    `asked` int64 (a,) are the clients that were asked for their size; None stands for all.
    """

    probability: float
    estimate: SizeEstimate | None = None
    asked: Ints | None = None


@dataclass(frozen=True)
class Draft:
    """A round as worked out: the plan with the facts of its mediators, and what the other facts are made of."""

    plan: Plan
    turnout: Turnout
    sampling: DataSampling


class Planner:
    """Plans the rounds of a run."""

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
        self.accounts = Accounts(config, sizes)
        self.row_rule = RowRule(chosen(config, "row rule"), options(config, "row rule"), streams, config.samples.wanted)
        self.weighing = Weighing(chosen(config, "weights"), options(config, "weights"))
        algorithm = local_algorithm(config)
        self.counts_once = algorithm is not None and bool(getattr(algorithm[1], "counts_once", False))
        self.seconds: Floats | None = None
        self._warned: set[str] = set()
        self._drafts: dict[int, Draft] = {}

    @property
    def sends_coming(self) -> bool:
        """Whether it helps workers to know the next cohort: they read whole clients, and not those of every round."""
        part = self.config.topology
        everybody = self.config.participation.clients == "all"
        return self.config.samples.rule == "all" and not everybody and part.placement != "mediator"

    def prepare(self, t: int, strata: Strata | None = None) -> None:
        """Work out a coming round while there is time: `plan` has only to enter it in the accounts then."""
        if t < self.config.rounds and t not in self._drafts:
            self._drafts[t] = self._draft(t, strata)

    def plan(self, t: int, strata: Strata | None = None) -> Plan:
        """The plan of round t, drawn from the strata in force if it needs any."""
        draft = self._drafts.pop(t, None) or self._draft(t, strata)
        self.seconds = draft.turnout.seconds
        self._drafts = {later: kept for later, kept in self._drafts.items() if later > t}
        return replace(self._with_coming(draft.plan), facts=self._facts(draft) | draft.plan.facts)

    def foreseen(self, t: int) -> Plan | None:
        """The plan of a round that is prepared, without its facts, which nobody is sent; None where it is not."""
        return self._with_coming(self._drafts[t].plan) if t in self._drafts else None

    def state(self) -> dict[str, Tensor]:
        """The accounts, for a checkpoint."""
        return self.accounts.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the accounts of a checkpoint."""
        self.accounts.load(state)

    def _with_coming(self, plan: Plan) -> Plan:
        following = self._drafts.get(plan.round + 1) if self.sends_coming else None
        return replace(plan, coming=following.plan.clients) if following else plan

    def _draft(self, t: int, strata: Strata | None) -> Draft:
        clips = self.config.privacy.clip_norm is not None
        turnout = self.cohorts.draw(t, strata)
        cohort = turnout.cohort
        opening = self.cohorts.opens(t)
        sampling = DataSampling(1.0, asked=np.empty(0, np.int64)) if opening else self.data_sampling(t, turnout)
        weighing = self._opening_weights() if opening else self.weighing
        self._check_draw(t, cohort, opening)
        mediators, divergences = self.groups.group(t, cohort.clients) if self.groups else (np.empty(0, np.int64), {})
        made = {"strata": len(strata.sizes), "stratum_sizes": strata.sizes.tolist()} if opening and strata else {}
        plan = Plan(
            round=t,
            lr=rate_of(self.config, t),
            clients=cohort.clients,
            coefficients=self._bounded(cohort, opening) if clips else self._coefficients(weighing, t, cohort),
            per_sample=weighing.per_sample,
            normalise=weighing.normalises(cohort) and not clips,
            probability=sampling.probability,
            mediators=mediators,
            one_step=opening,
            facts=made | divergences,
        )
        return Draft(plan, turnout, sampling)

    def _check_draw(self, t: int, cohort: Cohort, opening: bool) -> None:
        """Refuse a cohort that the local algorithm does not go with; warn where sizes count twice."""
        if not opening and (warning := weighs_twice(self.config)) is not None:
            self._warn_once("weights", t, warning)
        if not self.counts_once:
            return
        twice, sampler = cohort.clients[cohort.multiplicity > 1], self.cohorts.sampler
        if len(twice):
            raise UserError(
                f'local.algorithm = "{self.config.local.algorithm}" counts every participant once, but '
                f'participation.clients = "{sampler.name}" drew client {twice[0]} more than once in '
                f"round {t}: draw clients without replacement"
            )

    def _opening_weights(self) -> Weighing:
        """Those of the round in which all who are there take part: Σ ρ_k (FedSSO, Algorithm 1, line 3).

        Weights that make up for those who are away do so here too.
        """
        part = self.config.aggregation
        if part.weights in ("gradient-sum", "gradient-sum-squared"):
            return Weighing(resolve("weights", "samples"), {})
        if part.weights not in ("stratified", "literal"):
            return self.weighing
        population = "clients" if part.weights == "stratified" else part.population
        return Weighing(resolve("weights", "normalised"), {"population": population})

    def data_sampling(self, t: int, turnout: Turnout) -> DataSampling:
        """p = K/Ñ of the Bernoulli rule (FedSampling, Eq 2), the fixed ratio of the naive rule, K over the samples of
        all who are there for a pooled rule of the user's own, 1 otherwise.

        The size query goes to everybody who is there (FedSampling), or to those who receive the model (FedSTaS), who
        answer before some of them drop out.
        """
        part = self.config.samples
        if part.rule == "ratio":
            assert part.ratio is not None
            return DataSampling(part.ratio)
        if part.rule != "bernoulli":
            return DataSampling(self._wanted_share(turnout))
        assert part.wanted is not None
        queried = turnout.asked if part.asked == "participants" else turnout.present
        asked = None if isinstance(queried, int) else queried
        answers = answer_stream(self.streams, t, part.memoise)
        size = estimate_total(part.size_estimate, self.sizes, part.epsilon, part.threshold, answers, part.clip, asked)
        for saturation in saturations(size, part.wanted, part.threshold):
            self._warn_once(saturation.kind, t, saturation.message)
        return DataSampling(sampling_probability(part.wanted, size.total), size, asked)

    def _wanted_share(self, turnout: Turnout) -> float:
        """min(1, K over the samples of all who are there), which a pooled rule of the user's own is told; else 1."""
        wanted, rule = self.config.samples.wanted, self.row_rule
        if wanted is None or not rule.part.foreign or not rule.pooled:
            return 1.0
        sizes = self.sizes if isinstance(turnout.present, int) else self.sizes[turnout.present]
        return sampling_probability(wanted, int(sizes.sum()))

    def _coefficients(self, weighing: Weighing, t: int, cohort: Cohort) -> Floats:
        """Raw coefficients; of weights that count samples, the factor of one sample."""
        wanted = self.config.samples.wanted or max(1, int(self.sizes[cohort.clients].sum()))
        return weighing.of(replace(cohort, wanted=wanted), self.weight_sizes, t)

    def _bounded(self, cohort: Cohort, opening: bool) -> Floats:
        """Coefficients of clipped updates: 1/W, whoever returns (see `private_updates`)."""
        clients = len(self.sizes)
        return cohort.multiplicity / (clients if opening else planned_participants(self.config, clients))

    def _facts(self, draft: Draft) -> dict[str, Any]:
        plan, turnout, sampling = draft.plan, draft.turnout, draft.sampling
        cohort, system = turnout.cohort, self.config.system
        facts: dict[str, Any] = {"participants": len(cohort.clients)}
        facts |= {f"sampler_{name}": float(value) for name, value in cohort.numbers.items()}
        if plan.one_step:
            facts["opening"] = True
        if system.availability != "always":
            facts["available"] = turnout.available
        if system.drop_out or system.over_selection > 1:
            facts["asked"] = len(turnout.asked)
        if turnout.seconds is not None:
            facts["virtual_seconds"] = self._round_seconds(turnout.seconds, plan.mediators)
        if (strata := cohort.strata) is not None:
            facts["strata"] = len(strata.sizes)
            facts["stratum_sizes"] = strata.sizes.tolist()
            facts["allocation"] = strata.draws.tolist()
        if self.config.samples.rule in ("bernoulli", "ratio") and not plan.one_step:
            facts["sampling_probability"] = sampling.probability
        if sampling.estimate is not None:
            facts["size_estimate"] = sampling.estimate.total
            facts["size_true"] = sampling.estimate.true_total
            facts["size_asked"] = sampling.estimate.asked
            facts["clipped_fraction"] = sampling.estimate.clipped_fraction
        if self.accounts.usage is not None:
            facts |= self._diagnosed(cohort)
        return facts | self._accounted(plan.round, turnout, sampling)

    def _accounted(self, t: int, turnout: Turnout, sampling: DataSampling) -> dict[str, Any]:
        """Enter the round in the accounts; what they say."""
        if (exposure := self.accounts.exposure) is not None:
            self._warn_once("exposure", t, exposure.message)
        return self.accounts.enter(turnout, sampling.asked, self._used_samples(t, turnout.cohort, sampling))

    def _round_seconds(self, seconds: Floats, mediators: Ints) -> float:
        """Length of the round: that of the slowest participant, or of the slowest mediator's chain of visits."""
        if not len(mediators):
            return round_seconds(seconds)
        chains = np.bincount(mediators, weights=seconds)
        return self.config.topology.mediator_epochs * float(chains.max(initial=0.0))

    def _diagnosed(self, cohort: Cohort) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if cohort.inclusion is not None and cohort.inclusion.size:
            facts["inclusion_min"] = float(cohort.inclusion.min())
            facts["inclusion_mean"] = float(cohort.inclusion.mean())
            facts["inclusion_max"] = float(cohort.inclusion.max())
        if (strata := cohort.strata) is not None and strata.spread.any():
            facts["stratum_spreads"] = strata.spread.tolist()
        return facts

    def _used_samples(self, t: int, cohort: Cohort, sampling: DataSampling) -> Ints | None:
        """Global positions of the rows that the cohort uses; None for all rows, or if nobody wants or is to know."""
        if self.row_rule.uses_all or not self.row_rule.pooled or self.accounts.usage is None:
            return None
        sizes = self.sizes[cohort.clients]
        if self.cohorts.opens(t):
            positions = np.arange(int(sizes.sum()))
        else:
            positions = self.row_rule.positions(t, sizes, sampling.probability)
        shift = offsets_of(self.sizes)[cohort.clients] - offsets_of(sizes)[:-1]
        return positions + np.repeat(shift, used_counts(positions, offsets_of(sizes)))

    def _warn_once(self, kind: str, t: int, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("round %d: %s (said once)", t, message)
