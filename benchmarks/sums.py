"""Cost of the sum of a round alone: milliseconds of one reduction, for models of many sizes.

mpiexec -n 2 python -m benchmarks.sums
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import run_guarded

VALUES = (10**4, 10**5, 10**6, 10**7, 10**8)
REPEATS = 15


def reduction_ms(cluster: Cluster, values: int) -> float:
    """Return the median over the repeats of the slowest rank's milliseconds; all ranks enter together."""
    slot = cluster.sum_tensor(values, np.float32)
    slot[:] = cluster.rank
    seconds = []
    for _ in range(REPEATS):
        cluster.barrier()
        started = time.perf_counter()
        total = cluster.reduce_tensor()
        mine = time.perf_counter() - started
        assert total[0] == total[-1] == sum(range(cluster.size))
        seconds.append(cluster.maximum(int(1e9 * mine)) / 1e9)
    return 1e3 * statistics.median(seconds)


def main() -> int:
    for reduction in ("window", "allreduce"):
        cluster = Cluster.connect(reduction=reduction)
        found = [reduction_ms(cluster, values) for values in VALUES]
        if cluster.is_server:
            cells = ", ".join(f"{values:.0e} {ms:.3g} ms" for values, ms in zip(VALUES, found, strict=True))
            print(f"{cluster.size} ranks, {reduction}: {cells}", flush=True)
        cluster.close()
    return 0


if __name__ == "__main__":
    run_guarded(main)
