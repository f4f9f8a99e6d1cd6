"""FedScale's traces as tables: its activity and completion times, from a plain loop; pickles that are rejected."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from data_prep.__main__ import run as prepare
from fedmpi import UserError
from fedmpi.clients.availability import ClientAvailability
from fedmpi.clients.devices import draw_devices, phases, total
from fedmpi.clients.sampler import View
from fedmpi.common.streams import Streams
from fedmpi.config import load_config

N, DAY = 1000, 86_400


def synthetic_traces() -> tuple[dict[int, Any], dict[str, Any]]:
    """Make the traces of a thousand clients and a few, in the format of FedScale."""
    draws = np.random.Generator(np.random.Philox(8))
    devices = {
        k + 1: {"computation": float(draws.lognormal(3, 1)), "communication": float(draws.lognormal(8, 1))}
        for k in range(N + 7)
    }
    traces = {}
    for k in range(N + 7):
        times = np.sort(draws.choice(DAY, 2 * int(draws.integers(1, 9)), replace=False)).tolist()
        traces[f"user{k}"] = {
            "duration": sum(times[1::2]) - sum(times[::2]),
            "active": times[::2],
            "inactive": times[1::2],
            "finish_time": DAY + 3600 * int(draws.integers(0, 3)),
            "model": "CPH1801",
        }
    return devices, traces


class Phone:
    """A client of FedScale: activity and completion time as its paper's code defines them."""

    def __init__(self, device: dict[str, float], trace: dict[str, Any]):
        self.device, self.trace, self.place = device, trace, 0

    def active(self, now: float) -> bool:
        """Follow the intervals with an index that moves by at most one per call."""
        phase, starts, ends = now % self.trace["finish_time"], self.trace["active"], self.trace["inactive"]
        if phase > ends[self.place]:
            self.place = (self.place + 1) % len(starts)
        return starts[self.place] <= phase <= ends[self.place]

    def settled(self, now: float) -> bool:
        """Ask from the first interval on until the index has passed all intervals that are over."""
        self.place = 0
        return [self.active(now) for _ in range(len(self.trace["active"]) + 1)][-1]

    def seconds(self, samples: int, down: int, up: int) -> float:
        """Return the seconds of training on so many samples and of the transfers of so many bytes."""
        kbits = down / 1024 * 8 + up / 1024 * 8
        return 3 * samples * self.device["computation"] / 1000 + kbits / self.device["communication"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of the synthetic traces."""
    folder = tmp_path_factory.mktemp("traces")
    for name, content in zip(("devices", "behave"), synthetic_traces(), strict=True):
        (folder / name).write_bytes(pickle.dumps(content))
    words = f"traces --devices {folder}/devices --availability {folder}/behave --clients {N} --out {folder}/tables"
    assert prepare(words.split()) == 0
    return folder


def test_activity_and_completion_times_are_those_of_fedscale(converted: Path) -> None:
    devices, traces = synthetic_traces()
    listed, tables = [*traces.values()], converted / "tables"
    phones = [Phone(devices[k + 1], listed[(k + 1) % len(listed)]) for k in range(N)]
    rates = [
        f"devices.{key}={{name='table',file='{tables}/devices.parquet',column='{key}'}}"
        for key in ("speed", "upload", "download")
    ]
    law = f"clients.availability={{name='intervals',file='{tables}/availability.parquet'}}"
    config = load_config(None, ["clients.sampler=all", *rates, law])
    assert config.devices is not None
    sizes, streams = np.ones(N, np.int64), Streams(1)
    found = draw_devices(streams, sizes, config.devices)
    seconds = total(phases(found, np.arange(N), np.full(N, 20 * 32), 4_000_000, 1_000_000))
    expected = [phone.seconds(20 * 32, 4_000_000, 1_000_000) for phone in phones]
    np.testing.assert_allclose(seconds, expected, rtol=1e-9)
    there, clocks = (
        ClientAvailability(config, streams),
        np.random.Generator(np.random.Philox(2)).uniform(0, 9 * DAY, 40),
    )
    for clock in clocks.tolist():
        here = there.chance(View(0, N, sizes, N, streams, clock=clock))
        assert here.tolist() == [float(phone.settled(clock)) for phone in phones]
    for k in range(0, N, 40):  # asked after every start and end, as in a run of short rounds
        phone, trace = phones[k], phones[k].trace
        phone.place = 0
        for cycle in range(3):
            for event in sorted([*trace["active"], *trace["inactive"]]):
                clock = cycle * trace["finish_time"] + event + 0.5
                here = there.chance(View(0, N, sizes, N, streams, clock=clock))
                assert bool(here[k]) == phone.active(clock)


def test_entries_repeat_and_intervals_that_overlap_or_exceed_the_period_are_merged(tmp_path: Path) -> None:
    trace = {"active": [5, 1, 7, 20, 90, 9], "inactive": [8, 3, 12, 20, 130, 10], "finish_time": 100}
    (tmp_path / "behave").write_bytes(pickle.dumps({0: trace}))
    (tmp_path / "devices").write_bytes(pickle.dumps({k: {"computation": 10**k, "communication": 1} for k in range(2)}))
    words = f"traces --availability {tmp_path}/behave --devices {tmp_path}/devices --clients 3 --out {tmp_path}/out"
    assert prepare(words.split()) == 0
    table = pandas.read_parquet(tmp_path / "out" / "availability.parquet")
    assert table[["client", "start", "end"]].to_numpy().tolist() == [
        [k, *pair] for k in range(3) for pair in ([1, 3], [5, 12], [90, 100])
    ]
    speed = pandas.read_parquet(tmp_path / "out" / "devices.parquet")["speed"]
    np.testing.assert_allclose(speed, [1000 / 3, 100 / 3, 1000 / 3])
    with pytest.raises(UserError, match=r"has devices\.parquet already"):
        prepare(words.split())


class Evil:
    """Object whose pickle would call a function."""

    def __reduce__(self) -> Any:
        return print, ("called",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({1: Evil()}, r"names (builtins|__builtin__)\.print\. Only dicts, lists, numbers and texts"),
        ({1: {"computation": np.float64(3), "communication": 1}}, r"names numpy.*\. Only dicts"),
        ({1: {"computation": 3}}, "is not a FedScale trace with computation and communication"),
        ({}, "has no entries"),
        ([1, 2], "is not a FedScale trace"),
        ({1: {"computation": 3, "communication": 0}}, "entry 0 .* has no computation and communication above 0"),
        ({1: {"computation": "fast", "communication": 1}}, "that is not a number"),
        ({1: {"active": [0], "inactive": [1, 2], "finish_time": 9}}, "are not numbers in equal lists"),
        ({1: {"active": [0], "inactive": [float("inf")], "finish_time": 9}}, "are not finite times from 0 on"),
        ({1: {"active": [-1], "inactive": [3], "finish_time": 9}}, "are not finite times from 0 on"),
    ],
)
def test_other_pickles_are_rejected(content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "devices").write_bytes(pickle.dumps(content))
    kind = "availability" if "active" in str(content) else "devices"
    with pytest.raises(UserError, match=words):
        prepare(f"traces --{kind} {tmp_path}/devices --clients 3 --out {tmp_path}/out".split())
    assert "called" not in capsys.readouterr().out and not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="give --devices FILE, --availability FILE, or both"):
        prepare(f"traces --clients 3 --out {tmp_path}/out".split())
