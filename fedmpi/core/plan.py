"""Decisions of the server before a round: the selected clients, the data they use, and their aggregation weights.

All ranks measure the inputs of the plan; rank 0 alone decides. All random numbers come from streams keyed by the round,
so a plan depends on the configuration, the seed and the clients' sizes, never on the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.weights import Weighing
from fedmpi.clients.cohort import Cohort
from fedmpi.clients.sampler import ClientNumbers, ClientSampler
from fedmpi.clients.strata import Strata
from fedmpi.clients.stratifier import Stratifier
from fedmpi.clients.turnout import CohortDraw, Turnout
from fedmpi.common.apportionment import offsets_of, united
from fedmpi.common.decorators import MEASURABLE
from fedmpi.common.errors import UserError
from fedmpi.common.fairness import Usage, evenness
from fedmpi.common.plan import Plan
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.config import Config
from fedmpi.config.checks import weighs_twice
from fedmpi.config.server_tables import Mediators
from fedmpi.config.tables import local_algorithm
from fedmpi.core.placement import BalanceLearner, Layout
from fedmpi.core.reduce import RoundTotals
from fedmpi.local.optimizers import rate
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.mediators.groups import MediatorGroups
from fedmpi.mpi import Cluster
from fedmpi.privacy.sizes import (
    PrivacyLedger,
    SizeEstimate,
    answer_stream,
    estimate_total,
    exposure,
    sampling_probability,
    saturations,
)
from fedmpi.privacy.updates import GaussianAccountant, adds_noise, draws_in_secret, planned_participants
from fedmpi.samples.built_in_rules import used_counts
from fedmpi.samples.row_rule import RowRule

log = logging.getLogger("fedmpi")
Measure = Callable[[int, Tensor, Ints, Sequence[str]], Floats]
TrialNorms = Callable[[int, Tensor, Ints, Ints], Floats]


class Accounts:
    """Privacy and participation accounts of a run, kept by the server."""

    def __init__(self, config: Config, sizes: Ints):
        samples, privacy = config.samples, config.privacy
        private = samples.sampler.name == "bernoulli" and samples.size.estimate != "exact"
        self.sizes = sizes
        self.ledger = PrivacyLedger(len(sizes), samples.size.epsilon, samples.size.reuse_reports) if private else None
        self.exposure = exposure(config) if private else None
        self._unclipped_from = samples.size.max_size if private and not samples.size.clip else None
        self.accountant = (
            GaussianAccountant(privacy.noise_multiplier, privacy.delta, len(sizes)) if adds_noise(config) else None
        )
        self.draws_in_secret = draws_in_secret(config)
        rule = config.samples.sampler.component
        self.knows_rows = bool(rule.marks.get("pooled"))
        counted = int(sizes.sum()) if self.knows_rows and rule.name != "all" else 0
        self.usage = Usage(len(sizes), counted) if config.logging.diagnostics else None

    def enter(self, turnout: Turnout, answering: Ints | None = None, positions: Ints | None = None) -> dict[str, Any]:
        """Add a round; return the accounts' entries for its record."""
        cohort = turnout.cohort
        facts: dict[str, Any] = {}
        if self.ledger is not None:
            entry = self.ledger.record(answering, self._exposed(cohort, answering))
            facts["size_unprotected"] = entry.unprotected
            facts["size_epsilon_round"] = entry.epsilon_round
            facts["size_epsilon_max"] = entry.epsilon_max
            facts["size_epsilon_mean"] = entry.epsilon_mean
        if self.accountant is not None:
            drawn = (len(turnout.asked), turnout.available) if self.draws_in_secret else (1, 1)
            self.accountant.spend(*drawn)
            facts["update_epsilon"] = self.accountant.epsilon()
        if self.usage is not None:
            facts |= self._used(self.usage, cohort, positions)
        return facts

    def _exposed(self, cohort: Cohort, answering: Ints | None) -> Ints | None:
        """Return the clients that reveal their exact size in this round; None if there are none."""
        if self.exposure is not None and self.exposure.all_clients:
            return np.arange(len(self.sizes), dtype=np.int64)
        exposed = np.empty(0, np.int64)
        if self._unclipped_from is not None:
            asked = np.arange(len(self.sizes), dtype=np.int64) if answering is None else answering
            exposed = asked[self.sizes[asked] >= self._unclipped_from]
        if self.exposure is not None:
            exposed = united(exposed, cohort.clients)
        return exposed if len(exposed) else None

    def _used(self, usage: Usage, cohort: Cohort, positions: Ints | None) -> dict[str, float]:
        """Return how evenly clients, and samples if the server knows them, have been used so far."""
        usage.record(cohort.clients, cohort.multiplicity)
        if positions is not None:
            usage.record_samples(positions)
        clients = evenness(usage.clients)
        facts = {
            "clients_used": clients.used,
            "client_use_effective": clients.effective,
            "client_use_gini": clients.gini,
        }
        if not self.knows_rows:
            return facts
        samples = evenness(usage.samples) if usage.samples.size else evenness(usage.clients, self.sizes)
        return facts | {
            "samples_used": samples.used,
            "sample_use_effective": samples.effective,
            "sample_use_gini": samples.gini,
        }

    @property
    def _kept(self) -> dict[str, Any]:
        """The accounts of this run by their names in a checkpoint."""
        accounts = {"ledger": self.ledger, "accountant": self.accountant, "usage": self.usage}
        return {name: account for name, account in accounts.items() if account is not None}

    def state(self) -> dict[str, Tensor]:
        """Return the accounts as tensors, for a checkpoint."""
        arrays = {f"{name}.{key}": array for name, kept in self._kept.items() for key, array in kept.state().items()}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the accounts of a checkpoint."""
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise UserError(
                f"the checkpoint lacks {', '.join(missing)}, an account of what has been spent or used before, so the "
                "run cannot resume from it. Use the version of fedmpi that wrote it, or choose another --out"
            )
        for name, kept in self._kept.items():
            kept.load({key: state[f"{name}.{key}"].numpy() for key in kept.state()})


def rate_of(config: Config, t: int) -> float:
    """Return the local learning rate of round t."""
    schedule = config.local.schedule
    return rate(schedule.component, schedule.make(), config.local.lr, t, config.rounds)


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
        self.accounts = Accounts(config, sizes)
        self.row_rule = RowRule(
            config.samples.sampler.component, config.samples.sampler.options, streams, config.samples.budget
        )
        self.weighing = Weighing(config.server.weights.component, config.server.weights.options)
        algorithm = local_algorithm(config)
        self.counts_once = algorithm is not None and bool(getattr(algorithm[1], "counts_once", False))
        self.seconds: Floats | None = None
        self._warned: set[str] = set()
        self._drafts: dict[int, Draft] = {}

    @property
    def sends_coming(self) -> bool:
        """True if workers benefit from knowing the next cohort: they read whole clients, different in each round."""
        everybody = self.config.clients.sampler.name == "all"
        return (
            self.config.samples.sampler.name == "all" and not everybody and self.config.cluster.placement != "mediator"
        )

    def prepare(self, t: int, strata: Strata | None = None) -> None:
        """Draft a coming round in advance, so that `plan` only has to add it to the accounts."""
        if t < self.config.rounds and t not in self._drafts:
            self._drafts[t] = self._draft(t, strata)

    def plan(self, t: int, strata: Strata | None = None) -> Plan:
        """Return the plan of round t, drawn from the current strata if it needs any."""
        draft = self._drafts.pop(t, None) or self._draft(t, strata)
        self.seconds = draft.turnout.seconds
        self._drafts = {later: kept for later, kept in self._drafts.items() if later > t}
        following = self._drafts.get(t + 1) if self.sends_coming else None
        coming = draft.plan.coming if following is None else following.plan.clients
        return replace(draft.plan, coming=coming, facts=self._facts(draft) | draft.plan.facts)

    def _draft(self, t: int, strata: Strata | None) -> Draft:
        clips = self.config.privacy.clip_norm is not None
        turnout = self.cohorts.draw(t, strata)
        cohort = turnout.cohort
        opening = self.cohorts.opens(t)
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
            normalize=weighing.normalizes(cohort) and not clips,
            probability=probability,
            mediators=mediators,
            one_step=opening,
            facts=made | divergences,
        )
        return Draft(plan, turnout, estimate, queried)

    def _check_draw(self, t: int, cohort: Cohort, opening: bool) -> None:
        """Reject a cohort that the local algorithm does not support; warn if sizes count twice."""
        if not opening and (warning := weighs_twice(self.config)) is not None:
            self._warn_once("weights", t, warning)
        if not self.counts_once:
            return
        twice, sampler = cohort.clients[cohort.multiplicity > 1], self.cohorts.sampler
        if len(twice):
            raise UserError(
                f'local.algorithm = "{self.config.local.algorithm.name}" counts every participant once, but '
                f'clients.sampler = "{sampler.name}" drew client {twice[0]} more than once in '
                f"round {t}. Draw clients without replacement"
            )

    def _opening_weights(self) -> Weighing:
        """Return the weights of a round with all available clients: Σ ρ_k (FedSSO, Algorithm 1, line 3).

        Weights that correct for unavailable clients do so here too.
        """
        weights = self.config.server.weights
        if weights.name in ("gradient-sum", "gradient-sum-squared"):
            return Weighing(resolve("weights", "samples"), {})
        if weights.name not in ("stratified", "literal"):
            return self.weighing
        population = "clients" if weights.name == "stratified" else weights.options["population"]
        return Weighing(resolve("weights", "normalized"), {"population": population})

    def _sampled(self, t: int, turnout: Turnout) -> tuple[float, SizeEstimate | None, Ints | None]:
        """Return the probability with which samples are used, the size estimate used for it, and who was queried.

        p = K/Ñ for the Bernoulli rule (FedSampling, Eq 2), the fixed ratio for the naive rule, K over the samples of
        all available clients for a custom pooled sampler, 1 otherwise.

        The size query goes to all available clients (FedSampling), or to those that receive the model (FedSTaS), which
        answer before some of them drop out.
        """
        part, rule = self.config.samples, self.row_rule
        if part.sampler.name == "ratio":
            return part.sampler.options["ratio"], None, None
        if part.sampler.name != "bernoulli":
            if part.budget is None or not rule.part.foreign or not rule.pooled:
                return 1.0, None, None
            sizes = self.sizes if isinstance(turnout.present, int) else self.sizes[turnout.present]
            return sampling_probability(part.budget, int(sizes.sum())), None, None
        assert part.budget is not None
        table = part.size
        queried = turnout.asked if table.query == "selected" else turnout.present
        asked = None if isinstance(queried, int) else queried
        answers = answer_stream(self.streams, t, table.reuse_reports)
        size = estimate_total(table.estimate, self.sizes, table.epsilon, table.max_size, answers, table.clip, asked)
        for kind, message in saturations(size, part.budget, table.max_size).items():
            self._warn_once(kind, t, message)
        return sampling_probability(part.budget, size.total), size, asked

    def _coefficients(self, weighing: Weighing, t: int, cohort: Cohort) -> Floats:
        """Return the raw coefficients; for weights that count samples, the factor of one sample."""
        wanted = self.config.samples.budget or max(1, int(self.sizes[cohort.clients].sum()))
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
        if clients.failure_rate or clients.over_selection > 1:
            facts["asked"] = len(turnout.asked)
        if turnout.seconds is not None:
            facts["virtual_seconds"] = self._round_seconds(turnout.seconds, plan.mediators)
        if (strata := cohort.strata) is not None:
            facts["strata"] = len(strata.sizes)
            facts["stratum_sizes"] = strata.sizes.tolist()
            facts["allocation"] = strata.draws.tolist()
        if self.config.samples.sampler.name in ("bernoulli", "ratio") and not plan.one_step:
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
        return facts | self.accounts.enter(turnout, draft.queried, self._used_samples(plan, cohort))

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

    def _used_samples(self, plan: Plan, cohort: Cohort) -> Ints | None:
        """Return global positions of the samples that the cohort uses; None for all, or if secret or not needed."""
        if self.row_rule.uses_all or not self.row_rule.pooled or self.accounts.usage is None:
            return None
        sizes = self.sizes[cohort.clients]
        if plan.one_step:
            positions = np.arange(int(sizes.sum()))
        else:
            positions = self.row_rule.positions(plan.round, sizes, plan.probability)
        shift = offsets_of(self.sizes)[cohort.clients] - offsets_of(sizes)[:-1]
        return positions + np.repeat(shift, used_counts(positions, offsets_of(sizes)))

    def _warn_once(self, kind: str, t: int, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("round %d: %s (said once)", t, message)


class Inquiry:
    """Measurements of single clients on the ranks that own them, gathered on rank 0."""

    def __init__(
        self,
        cluster: Cluster,
        sampler: ClientSampler,
        numbers: ClientNumbers,
        owned: tuple[int, int],
        measure: Measure | None,
        observer: UpdateObserver | None,
        trial: TrialNorms,
    ):
        self.cluster, self.sampler, self.numbers, self.owned = cluster, sampler, numbers, owned
        self.measure, self.observer, self.trial = measure, observer, trial
        self.measured = tuple(name for name in sampler.numbers if name in MEASURABLE)

    @staticmethod
    def measures(sampler: ClientSampler) -> bool:
        """Check whether the sampler needs measurements that training and the clock do not provide."""
        return bool({*sampler.measures, *sampler.numbers} & set(MEASURABLE))

    def candidates(self, t: int, model: Tensor, wanted: Ints | None) -> dict[str, Floats]:
        """Measure the sampler's candidates (c,) on the current model, float64 (N,) each, NaN for all others.

        The seconds are not included; rank 0 computes them itself. Collective; only rank 0 gives `wanted` and receives
        the result (other ranks receive {}).
        """
        (everybody,) = self.cluster.broadcast([wanted] if wanted is not None else None)
        names = tuple(name for name in self.sampler.measures if name != "seconds")
        if not names:
            return {}
        gathered = self._gathered(t, model, everybody, names)
        if gathered is None:
            return {}
        clients, table = gathered
        fresh = {name: np.full(self.numbers.clients, np.nan) for name in names}
        for place, name in enumerate(names):
            fresh[name][clients] = table[:, place]
        return fresh

    def participants(self, plan: Plan, model: Tensor, seconds: Floats | None) -> None:
        """Record measurements of a round's clients on the model that they received; collective."""
        if self.measured:
            gathered = self._gathered(plan.round, model, plan.clients, self.measured)
            if gathered is not None:
                for place, name in enumerate(self.measured):
                    self._enter(name, plan.round, gathered[0], gathered[1][:, place])
        if "update_norm" in self.numbers.names:
            norms = self.observer.norms if self.observer is not None else {}
            clients = self.cluster.gather(np.fromiter(norms.keys(), np.int64, len(norms)))
            values = self.cluster.gather(np.fromiter(norms.values(), np.float64, len(norms)))
            if clients is not None and values is not None:
                self._enter("update_norm", plan.round, np.concatenate(clients), np.concatenate(values))
        if "seconds" in self.numbers.names and seconds is not None:
            self._enter("seconds", plan.round, plan.clients, seconds)

    def _gathered(self, t: int, model: Tensor, clients: Ints, names: Sequence[str]) -> tuple[Ints, Floats] | None:
        """Measure sorted clients on their owners; return the clients (k,) and numbers (k, names) on rank 0."""
        first, last = np.searchsorted(clients, self.owned)
        mine = clients[first:last]
        seen = [name for name in names if name in MEASURABLE]
        columns: dict[str, Floats] = {}
        if seen:
            assert self.measure is not None
            columns |= zip(seen, self.measure(t, model, mine, seen).T, strict=True)
        if "update_norm" in names:
            columns["update_norm"] = self.trial(t, model, clients, mine)
        table = np.stack([columns[name] for name in names], axis=1)
        everybody, tables = self.cluster.gather(mine), self.cluster.gather(table.ravel())
        if everybody is None or tables is None:
            return None
        return np.concatenate(everybody), np.concatenate(tables).reshape(-1, len(names))

    def _enter(self, name: str, round: int, clients: Ints, values: Floats) -> None:
        known = ~np.isnan(values)
        self.numbers.enter(name, round, clients[known], values[known])


@dataclass
class Decisions:
    """Measurement and planning before the work of a round."""

    cluster: Cluster
    layout: Layout
    planner: Planner  # Used by rank 0
    stratifier: Stratifier  # Measures and groups the clients, on all ranks together
    sampler: ClientSampler
    inquiry: Inquiry  # Measurements of single clients for the sampler, on all ranks
    # Learns the best assignment of work (rank 0 only), if `cluster.balance` = "measured" and data is shared
    balance: BalanceLearner

    @property
    def measured(self) -> int:
        """Number of clients measured for strata before this round (rank 0 only)."""
        return self.stratifier.measured

    @property
    def weighing(self) -> Weighing:
        """Aggregation weights of the selected clients."""
        return self.planner.weighing

    def observe(self, t: int, model: Tensor) -> None:
        """Measure on all ranks before the server plans round t: strata that are due, a sampler's candidates."""
        self.stratifier.observe(t, model)
        if self.sampler.measures:
            cohorts = self.planner.cohorts
            wanted = cohorts.candidates(t, self.stratifier.strata) if self.cluster.is_server else None
            measured = self.inquiry.candidates(t, model, wanted)
            if wanted is not None:
                cohorts.add_measured(t, wanted, measured)

    @property
    def inquires(self) -> bool:
        """True if the sampler needs measurements of a round's clients."""
        return bool(self.sampler.numbers)

    def inquire(self, plan: Plan, model: Tensor) -> None:
        """Measure the round's clients for the sampler; collective, before the server step."""
        self.inquiry.participants(plan, model, self.planner.seconds)

    def plan(self, t: int) -> Plan:
        """Return the server's plan of round t (rank 0 only)."""
        plan = self.planner.plan(t, self.stratifier.strata)
        self.stratifier.latest = plan.clients
        noise = self.stratifier.noise
        facts = plan.facts if noise is None else plan.facts | {"noise_clients": noise}
        return replace(plan, facts=facts, balance=self.balance.as_array())

    def plan_ahead(self, t: int) -> None:
        """Draft round t during training, if rank 0 does not train and the training cannot change the plan."""
        idle = self.cluster.is_server and self.layout.worker is None
        if idle and not self.sampler.depends_on_rounds:
            self.planner.prepare(t)
            if self.planner.sends_coming:
                self.planner.prepare(t + 1)

    def learn(self, totals: RoundTotals) -> None:
        """Learn the best assignment of work from the seconds of a typical round (rank 0 only)."""
        workers = slice(-self.layout.workers, None)  # the last ranks, with or without rank 0
        self.balance.observe(totals.rows[workers], totals.steps[workers], totals.busy[workers])

    def state(self) -> dict[str, Tensor]:
        """Return the checkpoint state; complete on rank 0."""
        accounts, numbers = self.planner.accounts.state(), self.inquiry.numbers.state()
        parts = self.stratifier.state() | accounts | self.balance.state() | numbers
        return parts | (self.sampler.state() if self.cluster.is_server else {})

    def load(self, tensors: Mapping[str, Tensor] | None, resumed: bool) -> None:
        """Restore the checkpoint state; collective."""
        saved = dict(tensors or {})
        if tensors is not None:
            for part in (self.planner.accounts, self.balance, self.inquiry.numbers, self.sampler):
                part.load(saved)
        self.stratifier.load(saved, resumed=resumed)
