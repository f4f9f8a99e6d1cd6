"""Model of a round's time on many devices: work and its imbalance, the sum on and between nodes, latencies.

    python -m benchmarks.scaling_model

Nothing is measured by this script. `Machine` lists the assumptions; docs/performance.md states which were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedmpi.core.placement import longest_first

BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Machine:
    """Performance of a cluster."""

    devices_per_node: int = 8  # Training ranks per node
    memory_bandwidth: float = 8e9  # Bytes per second at which a rank sums its slice of the node's slots
    barrier: float = 50e-6  # Seconds of a barrier of ranks that are awake
    # Seconds until a sleeping rank notices that all have arrived (half of the longest sleep), once per round
    lateness: float = 1e-3
    network_latency: float = 5e-6  # Seconds of a message between two nodes, and bytes per second of a node's link
    network_bandwidth: float = 12.5e9
    # Bytes per second between a device and its host; infinite if the device is the host
    staging_bandwidth: float = 20e9


@dataclass(frozen=True)
class Federation:
    """Work of a round."""

    cohort: int  # Selected clients
    client_seconds: float  # Mean seconds of a client's work on one device
    spread: float  # Standard deviation of the logarithm of a client's work
    values: int  # d, parameters of the model
    # Sequential work of every rank: the server's step, the record, the plan's broadcast
    server_seconds: float = 1.5e-3


def work_seconds(federation: Federation, devices: int) -> float:
    """Return the seconds of the busiest device if clients are assigned longest first; a client is never divided."""
    generator = np.random.default_rng(0)
    costs = generator.lognormal(-0.5 * federation.spread**2, federation.spread, federation.cohort)
    costs *= federation.client_seconds / costs.mean()
    return float(np.bincount(longest_first(costs, devices), costs, minlength=devices).max())


def sum_seconds(machine: Machine, values: int, devices: int) -> float:
    """Return the seconds of the fused sum: slots on the node, a ring of one leader per node, and the device copies."""
    size = BYTES_PER_VALUE * values
    ranks = min(devices, machine.devices_per_node)
    nodes = math.ceil(devices / machine.devices_per_node)
    on_node = 2 * machine.barrier + size * (ranks + 1) / ranks / machine.memory_bandwidth if ranks > 1 else 0.0
    steps = 2 * (nodes - 1)
    between = steps * machine.network_latency + steps / nodes * size / machine.network_bandwidth
    return on_node + between + 2 * size / machine.staging_bandwidth


def round_seconds(machine: Machine, federation: Federation, devices: int) -> float:
    """Return the seconds of a round; rank 0's plan, evaluation and checkpoints overlap with the work."""
    waiting = machine.lateness if devices > 1 else 0.0
    return (
        work_seconds(federation, devices)
        + sum_seconds(machine, federation.values, devices)
        + (federation.server_seconds + waiting)
    )


def efficiency(machine: Machine, federation: Federation, devices: int) -> float:
    """Return the speed-up over one device, divided by the number of devices."""
    return round_seconds(machine, federation, 1) / (devices * round_seconds(machine, federation, devices))


CASES = {
    "1,000 small clients, CNN": Federation(cohort=1_000, client_seconds=0.02, spread=0.5, values=10**6),
    "1,000 clients of unequal size, ResNet-18": Federation(1_000, 0.5, 1.0, 11 * 10**6),
    "10,000 clients, 100 million values": Federation(10_000, 2.0, 0.5, 10**8),
}
DEVICES = (1, 8, 16, 32, 64, 128, 256, 512)


def table(machine: Machine) -> str:
    """Return the seconds of a round and the efficiency of every case as Markdown."""
    lines = ["| a round | " + " | ".join(f"{n}" for n in DEVICES) + " |", "|---|" + "---:|" * len(DEVICES)]
    for name, federation in CASES.items():
        cells = [
            f"{round_seconds(machine, federation, n):.3g} s, {100 * efficiency(machine, federation, n):.0f} %"
            for n in DEVICES
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Machine()))
