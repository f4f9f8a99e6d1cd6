"""The free memory that `fedmpi doctor` shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedmpi.doctor.free_memory import free_memory

GIB = 2**30


def room(tmp_path: Path, available: int, groups: dict[str, int | str], inside: str = "0::/job/step") -> int | None:
    """Free memory where a machine and control groups of version 2 say so."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(inside + "\n")
    for name, most in groups.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("1000\n")
        (folder / "memory.stat").write_text("anon 400\ninactive_file 600\n")
    return free_memory(tmp_path / "proc", tmp_path / "groups")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, GIB),
        ({"job/step": "max"}, GIB),
        ({"job/step": 5000}, 5000 - 1000 + 600),  # what only holds copies of files is given back
        ({"job/step": "max", "job": 7000}, 6600),  # the group around it counts too
        ({"job/step": 9000, "job": 7000, "": 6500}, 6100),
        ({"job/step": 100}, 0),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, groups: dict[str, int | str], expected: int) -> None:
    assert room(tmp_path, GIB, groups) == expected


def test_control_groups_of_version_1_and_machines_that_say_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "groups" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("8000\n")
    (folder / "memory.usage_in_bytes").write_text("3000\n")
    (folder / "memory.stat").write_text("total_inactive_file 50\n")
    assert room(tmp_path, GIB, {}, "4:cpu,memory:/a\n3:cpuset:/b") == 5050
    assert free_memory(tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_a_limit_of_address_space_counts_less_what_is_held() -> None:
    program = (
        "import resource; from fedmpi.doctor.free_memory import *;"
        "held = address_space(); resource.setrlimit(resource.RLIMIT_AS, (held + 10**8,) * 2); print(free_memory())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 0 < int(printed) <= 10**8
