"""The programs that try many ranks and many rounds over emulated hosts: what they report, and where they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults import soak
from tests.mpi import many_hosts
from tests.mpi.hosts import NoHosts, emulated_hosts
from tests.mpi.many_hosts import Trace


def trace(**changed: object) -> Trace:
    facts = {name: np.arange(6) for name in ("cohorts0", "facts0", "rows0", "model0", "held0")}
    return Trace({**facts, "seconds0": np.ones((4, 5)), **changed}, 9.0)  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["cohorts", "facts", "rows", "model"])
def test_what_differs_from_one_rank_is_named(name: str) -> None:
    other = trace(**{f"{name}0": np.arange(7)})
    assert (trace().same(trace()), other.same(trace())) == ([], [name])
    assert trace().row(3, 2, trace()).endswith("| the same |")
    assert other.row(3, 2, trace()).endswith(f"| OTHER: {name} |")


def test_ranks_that_do_not_fit_into_memory_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(many_hosts, "traced", lambda *_: trace())
    assert many_hosts.compare(None, [10**9], 4) == 1  # type: ignore[arg-type]
    assert "are free: left out" in capsys.readouterr().out


@pytest.mark.parametrize("program", [many_hosts, soak])
def test_without_namespaces_the_programs_say_so(program, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(soak, "SETTINGS", ())
    assert program.main() == 2
    assert capsys.readouterr().err.startswith("error: no network namespaces")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_two_hosts_that_is_killed_is_that_of_one_process(tmp_path: Path, capsys) -> None:
    try:
        with emulated_hosts(1):
            pass
    except NoHosts as reason:
        pytest.skip(str(reason))
    assert soak.soak(tmp_path, rounds=30, ranks=3, hosts=2, kills=1, seed=1) == 0, capsys.readouterr().out


def test_growth_is_reported_of_starts_that_lasted(tmp_path: Path) -> None:
    memory = soak.Memory()
    memory.starts = [
        {"rank 0": [(0, 50), (100, 100), (150, 105), (200, 110)], "rank 1": [(0, 90), (120, 100), (220, 99)]},
        {"rank 0": [(200, 50), (290, 500), (390, 700)]},  # not long enough
        {},
    ]
    assert memory.growth() == [1.1, 0.99]
    found = [{"seconds": float(n // 10)} for n in range(50)]
    assert soak.seconds_by_part(found) == [0, 1, 2, 3, 4]
