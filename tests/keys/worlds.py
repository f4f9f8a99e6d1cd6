"""Small runs of some settings, each made once, and what a user sees of them."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import fedmpi
from fedmpi.config import config_toml, load_config
from tests.data_prep.command import main as prepare

QUIET = (
    "logging.tensorboard=false logging.participants=true cluster.threads=1 checkpoint.every=0 rounds=2 "
    "data.source=digits:clients=12,alpha=0.5 local.engine=sequential local.batch_size=40"
)
TIMED = ("seconds", "phase_seconds", "busy_seconds", "idle_seconds", "wall_seconds", "git_commit")
SEEN = ("rejection", "clients", "model", "record", "summary", "files", "printed")
"""Aspects in which two runs are compared, causes before effects."""

S = "model.hidden=[6]"
SOME = f"{S} clients.sampler=uniform clients.count=4"
ALL = f"{S} clients.sampler=all"
DRAWN = f"{S} clients.sampler=stratified clients.count=4 server.weights=stratified"
STRATA = f"{DRAWN} clients.sampler.strata=3 clients.sampler.features=full-gradient"
OPTICS = (
    f"{DRAWN} clients.sampler.within_stratum=uniform clients.sampler.features=label-histogram "
    "clients.sampler.clustering=optics clients.sampler.allocation=proportional"
)
ASKED = f"{SOME} samples.sampler=bernoulli samples.budget=200 server.weights=uniform"
PRIVATE = f"{ASKED} samples.size.estimate=randomized-response samples.size.max_size=200"
MEDIATED = f"{S} topology=mediators clients.sampler=uniform clients.count=6"
COPIES = f"{SOME} data.source=digits:clients=6,alpha=0.3 rebalance=true"
CLOCK = f"{SOME} devices=true rounds=1"
CLASSES = f"{CLOCK} devices.upload.median=1e30 devices.download.median=1e30 devices.speed=classes"
CLIPPED = f"{ALL} server.weights=uniform"
NOISED = f"{CLIPPED} privacy.clip_norm=0.1"


def observations(run: fedmpi.Run) -> dict[str, Any]:
    """Return the results of a run and the names of its files, without times."""
    records = [{key: value for key, value in record.items() if key not in TIMED} for record in run.records]
    names = sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("*.*")) if run.folder else []
    return {
        "rejection": "",
        "clients": [record.pop("clients", None) for record in records],
        "model": [value.tolist() for _, value in sorted(run.model.state_dict().items())],
        "record": records,
        "summary": {key: value for key, value in run.summary.items() if key not in TIMED},
        "files": [re.sub(r"(tfevents)\..*", r"\1", name) for name in names],
    }


class Runs:
    """Runs below a folder.

    Settings may contain {val}, {damaged} and {augmented}: prepared digits with validation samples, with a changed
    pixel, and with stored copies.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[str, dict[str, Any]] = {}

    def of(self, settings: str, in_folder: bool) -> dict[str, Any]:
        """Return the observations of a run. Equivalent settings share it."""
        words = [self._with_paths(word) for word in f"{QUIET} {settings}".split()]
        config = load_config(None, words)
        key = config_toml(config) + in_folder * "#"
        if key not in self.made:
            out = self.folder / f"run{len(self.made)}" if in_folder else None
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                try:
                    self.made[key] = observations(fedmpi.run(config, out=out, progress=True))
                except (fedmpi.UserError, fedmpi.ClientFailure) as error:
                    self.made[key] = {"rejection": str(error)}
            rounds = [line.split()[1] for line in printed.getvalue().splitlines() if line.startswith("round")]
            self.made[key]["printed"] = rounds
        return self.made[key]

    def difference(self, one: str, other: str, in_folder: bool) -> str:
        """Return the first of `SEEN` in which two runs differ; "" if they are the same."""
        left, right = self.of(one, in_folder), self.of(other, in_folder)
        assert not left["rejection"], left["rejection"]
        return next((name for name in SEEN if name not in right or not _equal(left[name], right[name])), "")

    def _with_paths(self, word: str) -> str:
        return re.sub(r"\{(val|damaged|augmented)\}", lambda name: str(self.prepared(name[1])), word)

    @cache  # noqa: B019 - one instance per module
    def prepared(self, name: str) -> Path:
        """Return a folder or file that settings name in braces."""
        out = self.folder / name
        if name == "val":
            assert prepare(f"digits --partition dirichlet --alpha 1 --clients 8 --val 0.2 --out {out}".split()) == 0
        elif name == "damaged":
            shutil.copytree(self.prepared("val"), out)
            with h5py.File(next(out.glob("**/train*.h5")), "r+") as file:
                file["x"][0] = 255 - file["x"][0]
        else:
            assert prepare(f"digits --partition dirichlet --alpha 1 --clients 8 --out {out}0".split()) == 0
            assert prepare(f"augment {out}0 --alpha 0.67 --out {out}".split()) == 0
        return out


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.array_equal(one, other, equal_nan=True))
    return bool(one == other)
