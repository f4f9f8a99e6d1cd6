"""Curves of five seeds: mean and spread of the test accuracy after every round, drawn where matplotlib is installed.

python docs/examples/five_seeds.py [curves.png]
"""

import sys

import numpy as np

import fedmpi

SEEDS = range(5)
SMALL = {"rounds": 15, "data.source": "digits:clients=40,alpha=0.3", "clients.count": 5}

curves = {}
for preset in ("fedavg", "fedprox"):
    runs = [fedmpi.run(preset, {**SMALL, "seed": seed}) for seed in SEEDS]
    curves[preset] = np.array([[record["test_accuracy"] for record in run.records] for run in runs])

for preset, accuracy in curves.items():
    mean, spread = accuracy.mean(0), accuracy.std(0, ddof=1)
    print(f"{preset:10} {mean[-1]:.3f} ± {spread[-1]:.3f} after {len(mean)} rounds, {len(accuracy)} seeds")

if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    for preset, accuracy in curves.items():
        rounds, mean, spread = np.arange(1, accuracy.shape[1] + 1), accuracy.mean(0), accuracy.std(0, ddof=1)
        plt.plot(rounds, mean, label=preset)
        plt.fill_between(rounds, mean - spread, mean + spread, alpha=0.2)
    plt.xlabel("round")
    plt.ylabel("test accuracy")
    plt.legend()
    plt.savefig(sys.argv[1], dpi=150)
