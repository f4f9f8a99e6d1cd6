"""Custom data samplers: their arguments, allowed results, and the names in errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import ComponentFailure, data_sampler
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.samples.rules import Pool, RowClient, RowRule

LABELS = [np.array([0, 1, 1, 2]), np.array([], np.int64), np.array([3, 3, 3]), np.array([0, 0, 1, 2, 2, 2])]
SIZES = np.array([len(labels) for labels in LABELS])


def asked(rule: Any, wanted: int | None = None, seed: int = 0, **options: Any) -> RowRule:
    return RowRule(resolve("data sampler", rule), options, Streams(seed), wanted, lambda client: LABELS[client].copy())


def rows_of(chosen: RowRule, clients: list[int], round: int = 0) -> dict[int, list[int]]:
    found = chosen.rows(round, np.array(clients), SIZES[clients], int(SIZES[clients].sum()))
    drawn = zip(found.members.tolist(), found.per_client(), strict=True)
    return {clients[place]: rows.tolist() for place, rows in drawn}


@data_sampler
def ones(client: RowClient) -> np.ndarray:
    return np.flatnonzero(client.labels == 1)


@data_sampler
def some(client: RowClient, *, most: int = 2) -> np.ndarray:
    return np.sort(client.generator.choice(len(client.labels), min(most, len(client.labels)), replace=False))


def test_a_rule_sees_the_labels_and_clients_without_rows_are_left_out() -> None:
    assert rows_of(asked(ones), [0, 1, 2, 3]) == {0: [1, 2], 3: [2]}


def test_a_sampler_draws_the_same_rows_of_a_client_on_any_rank() -> None:
    together = rows_of(asked(some), [0, 2, 3], round=4)
    assert {k: rows_of(asked(some), [k], round=4)[k] for k in (0, 2, 3)} == together
    by_hand = Streams(0).generator(Purpose.ROWS, 4, 3).choice(6, 2, replace=False)
    assert together[3] == sorted(by_hand.tolist())
    other = [rows_of(asked(some, most=3, seed=seed), [3], round=t)[3] for seed, t in ((0, 5), (1, 4), (2, 6))]
    assert any(found != other[0] for found in other[1:])


def test_a_sampler_is_given_the_requested_number_of_rows_per_client() -> None:
    expected_rows: list[float] = []

    @data_sampler
    def listening(client: RowClient) -> list[int]:
        expected_rows.append(client.expected)
        return [0]

    rows_of(asked(listening), [0, 2, 3])
    rows_of(asked(listening, wanted=26), [0, 2, 3])
    rows_of(asked(listening, wanted=5), [0, 2, 3])
    assert expected_rows[:6] == [4, 3, 6, 4, 3, 6]
    assert expected_rows[6:] == pytest.approx([5 * 4 / 13, 5 * 3 / 13, 5 * 6 / 13])


@pytest.mark.parametrize(
    "answer",
    [np.array([2, 0], np.uint8), [1, 1], [0, 4], [-1, 0], [True, False] * 2, [[0, 1]], [0.0, 1.0], None],
    ids=str,
)
def test_what_are_no_rows_is_rejected_naming_component_client_and_round(answer: Any) -> None:
    @data_sampler
    def wrong(client: RowClient) -> Any:
        return answer

    with pytest.raises(ComponentFailure, match="test_row_rule.*client 0.*round 7|test_row_rule.*round 7.*client 0"):
        rows_of(asked(wrong), [0], round=7)


@pytest.mark.parametrize("answer", [np.empty(0), (0, 3), np.array([1, 2], np.int32)])
def test_rows_may_be_any_sorted_whole_numbers(answer: Any) -> None:
    @data_sampler
    def given(client: RowClient) -> Any:
        return answer

    assert rows_of(asked(given), [0]) == ({0: [int(row) for row in answer]} if len(answer) else {})


@pytest.mark.parametrize("answer", [[7, 8], [1, 2], [5, 3]])
def test_positions_of_a_pooled_rule_are_checked_too(answer: list[int]) -> None:
    @data_sampler(pooled=True)
    def wrong(pool: Pool) -> list[int]:
        return answer

    with pytest.raises(ComponentFailure, match="positions"):
        asked(wrong).positions(0, np.array([10]), 1.0, 2, 8)


def test_a_pooled_sampler_is_given_the_requested_share_of_all_available_samples() -> None:
    shares: set[float] = set()

    @data_sampler(pooled=True)
    def listening(pool: Pool) -> np.ndarray:
        shares.add(pool.probability)
        return np.arange(pool.start, pool.stop)

    def odd_ones(view: Any) -> np.ndarray:
        return np.arange(6) % 2

    def shares_in(**settings: Any) -> set[float]:
        shares.clear()
        fedmpi.run("fedavg", {"rounds": 1, "clients.count": 2, "samples.sampler": listening} | settings, data=data)
        return set(shares)

    x, y, owner = np.ones((66, 2), np.float32), np.arange(66) % 2, np.repeat(np.arange(6), 11)
    data = fedmpi.ClientArrays(x, y, owner, test=(x, y))
    assert shares_in(**{"samples.budget": 11}) == {11 / 66}
    assert shares_in(**{"samples.budget": 11, "clients.availability": odd_ones}) == {11 / 33}
    assert shares_in(**{"samples.budget": 100}) == shares_in() == {1.0}
