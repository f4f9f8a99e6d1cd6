"""Freed memory is reused without page faults, unless the user has set glibc's allocator."""

import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import fedmpi
from fedmpi.process import malloc

PROGRAM = """
import resource, sys
from contextlib import nullcontext
import numpy as np
from fedmpi.process.malloc import freed_memory_kept

mebibytes, how = int(sys.argv[2]), sys.argv[1]

def backward_pass():
    blocks = [np.empty(mebibytes << 20, np.uint8) for _ in range(max(30, mebibytes) // mebibytes)]
    for block in blocks:
        block[::4096] = 1

with freed_memory_kept() if how == "kept" else nullcontext() as kept:
    backward_pass()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        backward_pass()
    print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES = HUGE.read_text() if HUGE.exists() else ""


def run(how: str, mebibytes: int = 3, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", PROGRAM, how, str(mebibytes)]
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0", **environment}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, faults = result.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
@pytest.mark.skipif("[always]" in HUGE_PAGES, reason="huge pages: few faults, whatever the settings")
@pytest.mark.parametrize("mebibytes", [3, 60])
def test_freed_memory_is_used_again_without_page_faults(mebibytes: int):
    pages = max(30, mebibytes) // mebibytes * 10 * mebibytes * 256
    assert run("as it is", mebibytes)[1] > pages // 4
    kept, faults = run("kept", mebibytes)
    assert kept == "True"
    assert faults < pages // 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"])
def test_the_users_settings_are_left_alone(name: str):
    assert run("kept", **{name: "glibc.malloc.check=0" if name == "GLIBC_TUNABLES" else "131072"})[0] == "False"


@pytest.mark.skipif(malloc._library() is None, reason="glibc's settings, where the user has made none")
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_keeps_memory_and_what_comes_after_it_does_not(fails: bool, monkeypatch: pytest.MonkeyPatch):
    made, change = [], malloc._set
    monkeypatch.setattr(malloc, "_set", lambda library, wanted: (made.append(wanted), change(library, wanted))[1])

    def fail(record: dict[str, object]) -> None:
        assert made == [malloc.IN_A_RUN]
        if fails:
            raise RuntimeError("a test fault")

    with pytest.raises(fedmpi.ComponentFailure) if fails else nullcontext():
        fedmpi.run("fedavg", {"rounds": 2}, data="digits", on_round=fail)
    assert made == [malloc.IN_A_RUN, malloc.AFTERWARDS]
    assert dict(malloc.IN_A_RUN).keys() >= dict(malloc.AFTERWARDS).keys() == {malloc.MMAP_MAX, malloc.TRIM_THRESHOLD}
