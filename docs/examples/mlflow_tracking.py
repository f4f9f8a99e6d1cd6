"""Send the numbers of every round to MLflow; for Weights & Biases replace the three mlflow calls by wandb's.

pip install mlflow
python docs/examples/mlflow_tracking.py
"""

import mlflow

import fedmpi

SETTINGS = {"rounds": 10, "local.lr": 0.1}


def numbers(record: dict) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float)}


with mlflow.start_run(run_name="fedavg"):
    mlflow.log_params(SETTINGS)
    fedmpi.run("fedavg", SETTINGS, on_round=lambda record: mlflow.log_metrics(numbers(record), step=record["round"]))
