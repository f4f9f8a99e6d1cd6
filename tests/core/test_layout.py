"""Who owns what: every client has one owner among the ranks that train, whatever their number."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from fedmpi.core.placement import lay_out

SIZES = np.array([5, 3, 9, 1], np.int64)
ONE_SHARD = np.array([0, 4], np.int64)


def layouts(ranks: int, server_trains: bool = False):
    clusters = [SimpleNamespace(rank=rank, size=ranks, is_server=rank == 0) for rank in range(ranks)]
    return [lay_out(cluster, SIZES, ONE_SHARD, server_trains) for cluster in clusters]


@pytest.mark.parametrize("server_trains", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_client_has_exactly_one_owner(ranks: int, server_trains: bool):
    owned = [range(*layout.owned) for layout in layouts(ranks, server_trains)]
    assert sorted(client for clients in owned for client in clients) == [0, 1, 2, 3]


def test_a_server_among_several_ranks_owns_nothing_unless_it_trains():
    assert layouts(3)[0].owned == (0, 0)
    assert layouts(3)[0].worker is None
    assert layouts(3, server_trains=True)[0].owned != (0, 0)
    assert layouts(1)[0].owned == (0, 4)


def test_workers_beyond_the_number_of_clients_stay_idle_with_one_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "fedmpi"):
        idle = [layout for layout in layouts(8)[1:] if len(range(*layout.owned)) == 0]
    assert len(idle) == 3
    assert len(caplog.records) == 1
    assert "7 workers for 4 clients: 3 stay idle" in caplog.text
