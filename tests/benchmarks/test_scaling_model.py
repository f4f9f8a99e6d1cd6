"""The scaling model says what it must at its limits."""

from dataclasses import replace

import pytest

from benchmarks.scaling_model import DEVICES, Federation, Machine, efficiency, round_seconds, sum_seconds, work_seconds

FEDERATION = Federation(cohort=1024, client_seconds=0.1, spread=0.0, values=10**6)


@pytest.mark.parametrize("devices", DEVICES)
def test_equal_clients_are_divided_evenly(devices: int):
    assert work_seconds(FEDERATION, devices) == pytest.approx(102.4 / devices)


def test_no_round_is_shorter_than_its_largest_client():
    unequal = replace(FEDERATION, spread=1.0)
    largest = work_seconds(unequal, 1024)
    assert work_seconds(unequal, 10_000) == pytest.approx(largest)
    assert round_seconds(Machine(), unequal, 10_000) > largest > 1.0


def test_the_sum_costs_more_with_every_node_but_its_volume_is_bounded():
    machine = Machine(network_latency=0.0)
    seconds = [sum_seconds(machine, 10**7, 8 * nodes) for nodes in (1, 2, 4, 64)]
    assert seconds == sorted(seconds)
    assert seconds[-1] - seconds[0] < 2 * 4e7 / machine.network_bandwidth


def test_one_device_is_fully_efficient_and_512_are_less():
    assert efficiency(Machine(), FEDERATION, 1) == 1.0
    assert 0 < efficiency(Machine(), FEDERATION, 512) < 1
