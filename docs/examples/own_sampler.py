"""Compare a custom sampler with uniform selection, in one script.

python docs/examples/own_sampler.py    or    mpiexec -n 3 python docs/examples/own_sampler.py
"""

import numpy as np

import fedmpi


@fedmpi.client_sampler
def largest_of_two(view) -> fedmpi.Cohort:
    """Each participant is the larger one of a pair drawn at random."""
    pairs = view.generator.permutation(view.available)[: 2 * view.count].reshape(2, -1)
    return fedmpi.Cohort(np.sort(np.where(view.sizes[pairs[0]] > view.sizes[pairs[1]], *pairs)))


small = {"rounds": 10, "data.source": "digits:clients=40,alpha=0.3", "clients.count": 5}
for sampler in ("uniform", largest_of_two):
    run = fedmpi.run("fedavg", {**small, "clients.sampler": sampler})
    if run.records:  # on rank 0
        name = getattr(sampler, "__name__", sampler)
        print(f"{name:15} {run.summary['final']['test_accuracy']:.3f}", sum(r["samples"] for r in run.records))
