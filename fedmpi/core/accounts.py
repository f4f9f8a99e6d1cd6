"""What the server keeps account of: privacy spent on sizes and on updates, and who was used how often."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.turnout import Turnout
from fedmpi.common.errors import UserError
from fedmpi.common.evenness import Usage, evenness
from fedmpi.common.types import AnyArray, Ints
from fedmpi.common.whole_numbers import united
from fedmpi.config import Config
from fedmpi.config.choices import chosen
from fedmpi.privacy.exposure import exposure
from fedmpi.privacy.gaussian import GaussianAccountant
from fedmpi.privacy.ledger import PrivacyLedger
from fedmpi.privacy.updates import adds_noise, draws_in_secret


class Accounts:
    """The server's accounts of a run."""

    def __init__(self, config: Config, sizes: Ints):
        samples, privacy = config.samples, config.privacy
        private = samples.rule == "bernoulli" and samples.size_estimate != "exact"
        self.sizes = sizes
        self.ledger = PrivacyLedger(len(sizes), samples.epsilon, samples.memoise) if private else None
        self.exposure = exposure(config) if private else None
        self._unclipped_from = samples.threshold if private and not samples.clip else None
        self.accountant = (
            GaussianAccountant(privacy.noise_multiplier, privacy.delta, len(sizes)) if adds_noise(config) else None
        )
        self.draws_in_secret = draws_in_secret(config)
        rule = chosen(config, "row rule")
        self.knows_rows = bool(rule.marks.get("pooled"))
        counted = int(sizes.sum()) if self.knows_rows and samples.rule != "all" else 0
        self.usage = Usage(len(sizes), counted) if config.logging.diagnostics else None

    def enter(self, turnout: Turnout, answering: Ints | None = None, positions: Ints | None = None) -> dict[str, Any]:
        """Enter a round; returns what the record says of the accounts."""
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
        """Clients whose size this round reveals as it is; None for nobody."""
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
        """How evenly clients, and samples where the server knows them, have been used so far."""
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

    def state(self) -> dict[str, Tensor]:
        """The accounts as tensors, for a checkpoint."""
        arrays: dict[str, AnyArray] = {}
        if self.ledger is not None:
            arrays |= {f"ledger.{name}": array for name, array in self.ledger.state().items()}
        if self.accountant is not None:
            arrays |= {f"accountant.{name}": array for name, array in self.accountant.state().items()}
        if self.usage is not None:
            arrays["usage.clients"], arrays["usage.samples"] = self.usage.clients, self.usage.samples
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the accounts of a checkpoint."""
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise UserError(
                f"the checkpoint lacks {', '.join(missing)}, an account of what has been spent or used before, so the "
                "run cannot go on from it: resume with the version of fedmpi that wrote it, or choose another --out"
            )
        if self.ledger is not None:
            self.ledger.load(_section(state, "ledger."))
        if self.accountant is not None:
            self.accountant.load(_section(state, "accountant."))
        if self.usage is not None:
            self.usage.clients[:] = state["usage.clients"].numpy()
            self.usage.samples[:] = state["usage.samples"].numpy()


def _section(state: dict[str, Tensor], prefix: str) -> dict[str, AnyArray]:
    return {name.removeprefix(prefix): value.numpy() for name, value in state.items() if name.startswith(prefix)}
