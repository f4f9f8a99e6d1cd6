"""Devices: rates from tables, and impossible ones; rounds without changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

import fedmpi
from fedmpi import UserError
from fedmpi.clients.devices import Devices, draw_devices
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.local.observer import client_drift, gradient_diversity, local_gain, update_moments

STREAMS = Streams(1)


def devices(clients: int, **settings: object) -> Devices:
    """The devices of this many clients, with "__" in keys for each point."""
    keys = [f"devices.{name.replace('__', '.')}={value}" for name, value in settings.items()]
    table = load_config(None, ["clients.sampler=all", "devices=true", *keys]).devices
    assert table is not None
    return draw_devices(STREAMS, np.ones(clients, np.int64), table)


@pytest.mark.parametrize(
    "options",
    [
        {"speed__median": 0},
        {"speed": "lognormal", "speed__sigma": -1},
        {"speed": "classes"},
        {"speed": "classes", "speed__rates": [], "speed__shares": []},
        {"speed": "classes", "speed__rates": [1, 2], "speed__shares": [1]},
        {"speed": "classes", "speed__rates": [1, 2], "speed__shares": [0.4, 0.4]},
        {"speed": "classes", "speed__rates": [1, -2], "speed__shares": [0.5, 0.5]},
    ],
    ids=str,
)
def test_impossible_rates_are_rejected(options: dict) -> None:
    with pytest.raises(UserError, match=r"devices\.speed"):
        devices(3, **options)


def test_rates_are_drawn_independently_from_their_distributions() -> None:
    links = {"upload": "lognormal", "upload__median": 5, "download": "lognormal", "download__median": 5}
    found = devices(4000, speed="classes", speed__rates=[1, 2, 3], speed__shares=[0.2, 0.5, 0.3], **links)
    np.testing.assert_allclose([(found.speed == rate).mean() for rate in (1, 2, 3)], [0.2, 0.5, 0.3], atol=0.04)
    logs = np.log([found.upload, found.download])
    np.testing.assert_allclose(np.median(logs, axis=1), np.log(5), atol=0.1)
    np.testing.assert_allclose(np.corrcoef([*logs, found.speed]), np.eye(3), atol=0.1)


def write(path: Path, columns: dict) -> None:
    """Write a table in the format that its name ends in."""
    if path.suffix == ".npz":
        np.savez(path, **{name: np.array(values) for name, values in columns.items()})
    elif path.suffix == ".csv":
        csv.write_csv(pyarrow.table(columns), path)
    else:
        parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize("name", ["devices.parquet", "devices.npz", "devices.csv"])
def test_rates_are_those_of_the_rows_or_of_the_column_client(name: str, tmp_path: Path) -> None:
    table = {"speed": [3, 1, 2.5], "download": [10, 20, 30]}
    chosen = {"speed": "table", "speed__file": tmp_path / name, "speed__column": "speed"}
    write(tmp_path / name, table)
    assert devices(3, **chosen).speed.tolist() == [3, 1, 2.5]
    write(tmp_path / name, table | {"client": [2, 0, 1]})
    found = devices(3, **chosen, download="table", download__file=tmp_path / name, download__column="download")
    assert found.speed.tolist() == [1, 2.5, 3] and found.download.tolist() == [20, 30, 10]
    assert (found.upload == 1e6).all()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"speed": [1, 2]}, "has 2 rows for 3 clients. Give one row per client"),
        ({"rate": [1, 2, 3]}, "has no column 'speed'. Its columns are rate"),
        ({"speed": [1, np.nan, 3]}, "speed of client 1 is nan in .*Give finite numbers above 0"),
        ({"speed": [1, 2, np.inf]}, "speed of client 2 is inf in"),
        ({"speed": [1, 2, 0]}, "speed of client 2 is 0 in"),
        ({"speed": [1, 2, 0], "client": [2, 1, 0]}, "speed of client 0 is 0 in"),
        ({"speed": ["a", "b", "c"]}, "column 'speed' of .* holds values that are no numbers"),
        ({"speed": np.array([1, 2, 3], "M8[ns]")}, "column 'speed' of .* no numbers .their type is datetime64"),
        ({"speed": [1, 2, 3], "client": [0, 1, 1]}, "several rows of client 1"),
        ({"speed": [1, 2, 3], "client": [0, 1, 3]}, "column 'client' of .* holds 3. The 3 clients are 0 to 2"),
        ({"speed": [1, 2, 3], "client": [0, 1, 1.5]}, "column 'client' of .* holds 1.5"),
    ],
    ids=str,
)
def test_tables_that_do_not_fit_the_clients_are_rejected(columns: dict, words: str, tmp_path: Path) -> None:
    for name in ("devices.parquet", "devices.npz"):
        write(tmp_path / name, columns)
        with pytest.raises(UserError, match=words):
            devices(3, speed="table", speed__file=tmp_path / name, speed__column="speed")
    with pytest.raises(UserError, match="cannot be read .*relative to the working directory"):
        devices(3, speed="table", speed__file=tmp_path / "nowhere.parquet", speed__column="speed")
    with pytest.raises(UserError, match=r"must end in one of \.parquet, \.npz, \.csv"):
        devices(3, speed="table", speed__file="devices.xlsx", speed__column="speed")


def test_a_run_resumes_only_with_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("rates.npz"), {"speed": [1.0, 2, 3]})
    table = {"name": "table", "file": "rates.npz", "column": "speed"}
    given = {"rounds": 2, "clients.sampler": "all", "devices.speed": table, "logging.tensorboard": False}
    run = fedmpi.run("fedavg", given, data="digits:clients=3", out="run", stop=lambda: True)
    assert run.ending == "stopped"
    write(Path("rates.npz"), {"speed": [1.0, 2, 4]})
    with pytest.raises(UserError, match=r"devices\.speed\.file differs from the file that this run started with"):
        fedmpi.run("fedavg", given, data="digits:clients=3", out="run", resume=True)
    write(Path("rates.npz"), {"speed": [1.0, 2, 3]})
    run = fedmpi.run("fedavg", given, data="digits:clients=3", out="run", resume=True)
    assert run.ending == "finished" and [*run.summary["plugins"]] == ["devices.speed.file.sha256"]


def test_a_round_without_changes_has_neither_diversity_nor_drift_nor_gain() -> None:
    nobody = update_moments(np.empty(0), np.empty(0), np.empty(0))
    assert gradient_diversity(nobody, 0.0) == client_drift(nobody, 0.0) == local_gain(nobody) == 0.0
    still = update_moments(np.zeros(2), np.ones(2), np.array([1.0, 3.0]))
    assert gradient_diversity(still, 0.0) == client_drift(still, 0.0) == 0.0 and local_gain(still) == 2.0
