"""The program does what the papers say: presets and random stars agree with an independent replay in float64.

Participants, rows and counts are compared exactly, weights to 2e-7, models to 1e-5 of their length after every round,
losses to 1e-5, the rest of the record to rounding.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from fedmpi import Config, UserError, presets
from fedmpi.config import config_toml, load_config
from tests.mpi.launch import run_mpi
from tests.reference.compare import differences
from tests.reference.drawn import DOUBLE, drawn_stars
from tests.reference.program import traced

PROGRAM = Path(__file__).parent / "program.py"
QUIET = ["logging.tensorboard=false", "cluster.threads=1", "checkpoint.every=0", "rounds=3"]
SMALL = ["data.source=digits:clients=14,alpha=0.4"]
SMOOTH = ["model.hidden=[12]", "model.activation=tanh"]
"""A rounding can switch a ReLU on or off."""
IN_FLOAT64 = [f"model.name={DOUBLE}", "data.normalize=false"]
"""Against the sign in Yogi, which a rounding in float32 can turn."""
STARS = [preset.name for preset in presets() if preset.table.get("topology", {}).get("kind") != "mediators"]
FEW, MANY = 14, 80
"""Random configurations by default, and with `-m slow`; some name an engine that the model cannot use."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)


def preset_config(name: str) -> Config:
    """A preset on fourteen clients of the embedded digits."""
    fitted = [*QUIET, *SMALL, *(IN_FLOAT64 if name == "fedyogi" else SMOOTH), f"preset={name}"]
    given = load_config(None, fitted)
    fitted += ["clients.count=5"] if given.clients.count else []
    fitted += ["clients.fraction=0.4"] if given.clients.fraction else []
    fitted += ["samples.budget=300"] if given.samples.budget else []
    fitted += ["samples.size.max_size=80"] if given.samples.size.estimate != "exact" else []
    return load_config(None, fitted)


def compare(config: Config, folder: Path) -> bool:
    """Run and replay; False where the program refuses what the data forbid."""
    try:
        trace = traced(config, folder)
    except UserError:
        return False
    assert trace is not None
    found = differences(config, trace)
    assert not found, "\n".join([*found[:10], config_toml(config)])
    return True


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_short_last_batches_are_left_out(engine: str, tmp_path: Path) -> None:
    more = ["clients.count=6", "local.epochs=2", "local.drop_last=true", f"local.engine={engine}"]
    more += ["devices=true", "clients.over_selection=1.5"]
    assert compare(load_config(None, [*QUIET, *SMALL, "preset=fedavg", *more]), tmp_path)


@pytest.mark.parametrize("name", STARS)
def test_a_preset_is_what_its_paper_says(name: str, tmp_path: Path) -> None:
    assert compare(preset_config(name), tmp_path / "run")


def test_random_stars_agree_with_the_plain_loop(tmp_path: Path) -> None:
    ran = [compare(config, tmp_path / str(i)) for i, config in enumerate(drawn_stars(FEW, seed=1))]
    assert sum(ran) > FEW / 2


def test_random_stars_with_state_agree_with_the_plain_loop(tmp_path: Path) -> None:
    ran = [compare(config, tmp_path / str(i)) for i, config in enumerate(drawn_stars(3, seed=3, with_state=True))]
    assert sum(ran) >= 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_random_stars_with_state_agree_with_the_plain_loop(tmp_path: Path) -> None:
    ran = [compare(config, tmp_path / str(i)) for i, config in enumerate(drawn_stars(30, seed=4, with_state=True))]
    assert sum(ran) > 15


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_random_stars_agree_with_the_plain_loop(tmp_path: Path) -> None:
    ran = [compare(config, tmp_path / str(i)) for i, config in enumerate(drawn_stars(MANY, seed=2))]
    assert sum(ran) > MANY / 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_ranks_agree_with_the_plain_loop(tmp_path: Path) -> None:
    configs = [preset_config(name) for name in ("fedsampling", "fedsso", "fedstas-dp", "fedavg-weighted", "fedyogi")]
    paths = [tmp_path / f"{i}.json" for i in range(len(configs))]
    for path, config in zip(paths, configs, strict=True):
        path.write_text(config.model_dump_json(exclude_defaults=True))
    result = run_mpi(3, [PROGRAM, tmp_path / "out.npz", tmp_path / "runs", *paths], timeout=300)
    assert result.returncode == 0, result.stderr
    held = np.load(tmp_path / "out.npz")
    for i, config in enumerate(configs):
        keys = ("cohorts", "rows", "factors", "normalized", "models", "records")
        found = differences(config, {key: held[f"{key}{i}"] for key in keys})
        assert not found, "\n".join([*found[:10], config_toml(config)])


def test_the_plain_loop_sees_a_difference(tmp_path: Path) -> None:
    config = preset_config("fedavg")
    trace = traced(config, tmp_path / "run")
    assert trace is not None
    records = [json.loads(line) for line in str(trace["records"]).splitlines()]
    records[1]["samples"] += 1
    changed = {
        "rows": trace["rows"] + [0, 0, 1],
        "factors": trace["factors"] * np.where(trace["factors"][:, 1:2] == trace["factors"][0, 1], [1, 1, 1.001], 1),
        "models": trace["models"] * np.float32(1.0001),
        "records": np.array("\n".join(map(json.dumps, records))),
    }
    for key, value in changed.items():
        assert differences(config, {**trace, key: value}), key
