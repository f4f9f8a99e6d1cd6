"""Fields of the records and of the summary that no other test compares with expected values."""

from __future__ import annotations

import math

import numpy as np

from tests.keys.entries import MEDIATED, NOISED, PRIVATE, SOME, near
from tests.keys.watched import Watcher

RELAYS = f"{MEDIATED} topology.clients_per_mediator=2 rebalance=true"


def test_divergences_before_copies_are_those_of_the_participants_own_samples(watcher: Watcher):
    seen, plain = watcher.see(RELAYS), watcher.see(SOME)
    for t, record in enumerate(seen.record):
        counts = plain.class_counts[seen.cohort[t][0]].astype(float)
        shares = counts / counts.sum(1, keepdims=True)
        terms = [sum(p * math.log(p * len(row)) for p in row if p) for row in shares.tolist()]
        assert near(record["kl_client_before_mean"], np.mean(terms))
        assert near(record["kl_client_before_std"], np.std(terms))
        assert near(record["kl_client_before_max"], max(terms))
        assert near(record["kl_client_before_quartiles"], np.quantile(terms, [0, 0.25, 0.5, 0.75, 1]))


def test_the_summary_reports_what_was_spent_in_all(watcher: Watcher):
    sizes, updates = watcher.see(PRIVATE), watcher.see(f"{NOISED} privacy.noise_multiplier=1")
    for key in ("size_epsilon_max", "size_epsilon_mean"):
        assert sizes.summary[key] == sizes.record[-1][key] == 6.0
    assert (
        updates.summary["update_epsilon"] == updates.record[-1]["update_epsilon"] > updates.record[0]["update_epsilon"]
    )
