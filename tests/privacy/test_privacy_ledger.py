"""The ledger adds up what clients reveal, and charges a permanent answer once."""

import math

import numpy as np
import pytest

from fedmpi.privacy.sizes import LedgerEntry, PrivacyLedger


def test_every_answer_costs_its_epsilon():
    ledger = PrivacyLedger(4, 1.5)
    assert ledger.record(None) == LedgerEntry(1.5, 1.5, 1.5)
    assert ledger.record(np.array([0, 2])) == LedgerEntry(1.5, 3.0, pytest.approx(2.25))
    assert ledger.spent().tolist() == [3.0, 1.5, 3.0, 1.5]


def test_a_memoised_answer_is_paid_for_once():
    ledger = PrivacyLedger(4, 2.0, memoise=True)
    assert ledger.record(np.array([1])) == LedgerEntry(2.0, 2.0, 0.5)
    assert ledger.record(np.array([1])) == LedgerEntry(0.0, 2.0, 0.5)
    assert ledger.record(np.array([1, 3])) == LedgerEntry(2.0, 2.0, 1.0)
    assert ledger.record(None).epsilon_round == 2.0
    assert ledger.record(None) == LedgerEntry(0.0, 2.0, 2.0)


def test_asking_nobody_costs_nothing():
    assert PrivacyLedger(3, 2.0).record(np.zeros(0, np.int64)) == LedgerEntry(0.0, 0.0, 0.0)


def test_exact_sizes_have_no_privacy_for_those_asked():
    ledger = PrivacyLedger(2, math.inf)
    assert ledger.record(np.array([1])).epsilon_max == math.inf
    assert ledger.spent().tolist() == [0.0, math.inf]


def test_a_client_whose_size_is_known_has_spent_without_bound():
    ledger = PrivacyLedger(4, 1.5)
    assert ledger.record(None, np.array([2])) == LedgerEntry(math.inf, math.inf, math.inf, 1)
    assert ledger.record(None, np.array([2])) == LedgerEntry(1.5, math.inf, math.inf, 1)
    assert ledger.record(None, np.array([0, 2])) == LedgerEntry(math.inf, math.inf, math.inf, 2)
    assert ledger.spent().tolist() == [math.inf, 4.5, math.inf, 4.5]


def test_a_ledger_continues_from_its_state():
    first, second = PrivacyLedger(3, 1.0), PrivacyLedger(3, 1.0)
    first.record(np.array([0, 1]))
    second.load(first.state())
    assert second.record(None) == first.record(None)
    first.record(np.array([0]), np.array([1]))
    second.load(first.state())
    assert second.spent().tolist() == first.spent().tolist() == [3.0, math.inf, 1.0]
