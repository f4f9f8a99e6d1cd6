"""A search for the learning rate and the local epochs; hopeless trials are ended early.

pip install optuna
python docs/examples/optuna_search.py [trials]
"""

import sys

import optuna

import fedmpi

SMALL = {"rounds": 10, "data.source": "digits:clients=40,alpha=0.3", "clients.count": 5}


def objective(trial: optuna.Trial) -> float:
    choices = {
        "local.lr": trial.suggest_float("local.lr", 1e-3, 0.5, log=True),
        "local.epochs": trial.suggest_int("local.epochs", 1, 4),
    }

    def on_round(record: dict) -> bool:
        trial.report(record["test_accuracy"], record["round"])
        return trial.should_prune()

    run = fedmpi.run("fedavg", {**SMALL, **choices}, on_round=on_round)
    if run.ending == "ended":
        raise optuna.TrialPruned
    return run.summary["final"]["test_accuracy"]


study = optuna.create_study(
    direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner()
)
study.optimize(objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 20)
print(f"accuracy {study.best_value:.3f} with {study.best_params}")
