"""Accounts of a run, kept by the server: privacy spent, how evenly clients are used, and what their devices spend."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.turnout import Turnout
from fedmpi.common.apportionment import united
from fedmpi.common.fairness import Usage, evenness
from fedmpi.common.types import AnyArray, Ints
from fedmpi.config import Config
from fedmpi.privacy.sizes import PrivacyLedger, exposure
from fedmpi.privacy.updates import accountant, draws_in_secret
from fedmpi.records.history import clients_as_text


class Consumption:
    """Bytes that each client has received and sent for models and updates, and its energy."""

    def __init__(self, clients: int, bytes_down: int, bytes_up: int, energy: bool):
        self.bytes_down, self.bytes_up = bytes_down, bytes_up
        self.spent = {"bytes": np.zeros(clients, np.int64)} | ({"joules": np.zeros(clients)} if energy else {})

    def enter(self, turnout: Turnout) -> tuple[Ints, dict[str, AnyArray]]:
        """Add a round; return the clients (a,) that receive or send a model in it, and the bytes and joules of each."""
        clients = np.union1d(turnout.asked, turnout.cohort.clients)
        asked, sent = (np.searchsorted(clients, some) for some in (turnout.asked, turnout.cohort.clients))
        count = partial(np.bincount, minlength=len(clients))
        spent: dict[str, AnyArray] = {"bytes": self.bytes_down * count(asked) + self.bytes_up * count(sent)}
        spent |= {} if turnout.joules is None else {"joules": count(asked, turnout.joules)}
        for name, values in spent.items():
            self.spent[name][clients] += values
        return clients, spent

    def state(self) -> dict[str, AnyArray]:
        """Return the sums so far, (N,) each, for a checkpoint."""
        return {name: values.copy() for name, values in self.spent.items()}

    def load(self, state: dict[str, AnyArray]) -> None:
        """Restore the sums of a checkpoint."""
        self.spent = {name: state[name].copy() for name in self.spent}


class Accounts:
    """Privacy, participation and consumption accounts of a run, kept by the server."""

    def __init__(self, config: Config, sizes: Ints, bytes_down: int = 0, bytes_up: int = 0):
        samples = config.samples
        rule = samples.sampler
        private = rule.marks.get("probability") == "estimate" and samples.size.estimate != "exact"
        self.sizes = sizes
        self.ledger = PrivacyLedger(len(sizes), samples.size.epsilon, samples.size.reuse_reports) if private else None
        self.exposure = exposure(config) if private else None
        self._unclipped_from = samples.size.max_size if private and not samples.size.clip else None
        self.accountant = accountant(config, len(sizes))
        self._lists_clients = config.logging.participants
        self.draws_in_secret = draws_in_secret(config)
        self.usage = Usage(len(sizes)) if config.logging.diagnostics else None
        self.consumption: Consumption | None = None
        if (devices := config.devices) is not None and config.topology.name != "mediators":
            self.consumption = Consumption(len(sizes), bytes_down, bytes_up, devices.power is not None)

    def enter(self, turnout: Turnout, answering: Ints | None = None) -> dict[str, Any]:
        """Add a round; return the accounts' entries for its record."""
        cohort = turnout.cohort
        facts: dict[str, Any] = {}
        if self.consumption is not None:
            clients, spent = self.consumption.enter(turnout)
            if self._lists_clients:
                facts["invited"] = clients_as_text(clients)
                facts |= {f"invited_{name}": values.tolist() for name, values in spent.items()}
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
            self.usage.record(cohort.clients, cohort.multiplicity)
            used = evenness(self.usage.clients)
            facts |= {"clients_used": used.used, "client_use_effective": used.effective, "client_use_gini": used.gini}
        return facts

    def of_clients(self, clients: Ints) -> dict[str, AnyArray]:
        """Return columns on these clients (k,) for the table of single clients."""
        return {} if self.consumption is None else {n: all_[clients] for n, all_ in self.consumption.spent.items()}

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

    @property
    def _kept(self) -> dict[str, Any]:
        """The accounts of this run by their names in a checkpoint."""
        names = ("ledger", "accountant", "usage", "consumption")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def state(self) -> dict[str, Tensor]:
        """Return the accounts as tensors, for a checkpoint."""
        arrays = {f"{name}.{key}": array for name, kept in self._kept.items() for key, array in kept.state().items()}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the accounts of a checkpoint; raise KeyError if one is missing."""
        for name, kept in self._kept.items():
            kept.load({key: state[f"{name}.{key}"].numpy() for key in kept.state()})
