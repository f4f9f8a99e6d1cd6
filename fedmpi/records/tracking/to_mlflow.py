"""MLflow: a run of the experiment `logging.project`, where MLFLOW_TRACKING_URI says (unless set its own default)."""

from __future__ import annotations

import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from PIL import Image

from fedmpi.common.files import write_whole
from fedmpi.common.types import AnyArray
from fedmpi.records.tracking.base import Settings, Tracker

KEPT = "mlflow-run"
"""The file of RUN that holds the number of MLflow's run, by which a resumed run goes on with it."""
LONGEST = 500
"""Characters of a parameter's value that every store of MLflow takes."""


class MLflow(Tracker):
    """Metrics by group, settings as parameters, the picture as an artifact.

    Parameters
    ----------
    folder : Path
        RUN; its name is that of MLflow's run.
    settings : dict
    project : str
        The experiment, made when there is none.
    """

    title = "MLflow"
    raises = (MlflowException, OSError)

    def __init__(self, folder: Path, settings: Settings, project: str):
        self._client, path = MlflowClient(), folder / KEPT
        if path.exists():
            self._run = path.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            self._had = max(
                (one.step for one in self._client.get_metric_history(self._run, "train/samples")), default=-1
            )
        else:
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project)
            self._run = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
            write_whole(path, f"{self._run}\n".encode())
            parameters = [Param(key, str(value)[:LONGEST]) for key, value in settings.items()]
            for start in range(0, len(parameters), 100):
                self._client.log_batch(self._run, params=parameters[start : start + 100])
            self._client.log_batch(self._run, tags=[RunTag("fedmpi.folder", str(folder.resolve()))])
            self._had = -1

    def record(self, round: int, numbers: dict[str, float]) -> None:
        if round > self._had:
            now = int(time.time() * 1000)
            self._client.log_batch(
                self._run, metrics=[Metric(name, value, now, round) for name, value in numbers.items()]
            )

    def show(self, picture: AnyArray) -> None:
        self._client.log_image(self._run, Image.fromarray(picture), artifact_file="clients.png")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")
