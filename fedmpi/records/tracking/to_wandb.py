"""Weights & Biases: a run of the project `logging.project`; with WANDB_MODE=offline kept in RUN/wandb."""

from __future__ import annotations

from pathlib import Path

import wandb
from PIL import Image

from fedmpi.common.files import write_whole
from fedmpi.common.types import AnyArray
from fedmpi.records.tracking.base import Settings, Tracker

KEPT = "wandb-run"
"""The file of RUN that holds the number of the run at Weights & Biases, by which a resumed run goes on with it."""


class WeightsAndBiases(Tracker):
    """Metrics by group, settings as the configuration, the picture as an image.

    Parameters
    ----------
    folder : Path
        RUN; its name is that of the run.
    settings : dict
    project : str
    """

    title = "Weights & Biases"
    raises = (wandb.Error, OSError)

    def __init__(self, folder: Path, settings: Settings, project: str):
        path = folder / KEPT
        known = path.read_text().strip() if path.exists() else None
        self._run = wandb.init(
            project=project,
            id=known,
            name=folder.resolve().name,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
            reinit="create_new",  # runs of several threads, or one after another, stay apart
            settings=wandb.Settings(silent=True, disable_git=True, x_disable_stats=True),
        )
        if known is None:
            write_whole(path, f"{self._run.id}\n".encode())
        self._had = self._run.step - 1

    def record(self, round: int, numbers: dict[str, float]) -> None:
        if round > self._had:
            self._run.log(numbers, step=round)

    def show(self, picture: AnyArray) -> None:
        self._run.log({"clients/samples of each class": wandb.Image(Image.fromarray(picture))}, step=0)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
