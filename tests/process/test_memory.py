"""Freed memory is reused without page faults, unless the user has set glibc's allocator."""

import os
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

def backward_pass(mebibytes):
    blocks = [np.empty(mebibytes << 20, np.uint8) for _ in range(60 // mebibytes)]
    for block in blocks:
        block[::4096] = 1

for mebibytes in (3, 60):
    with freed_memory_kept() if sys.argv[1] == "kept" else nullcontext(True) as kept:
        assert kept
        backward_pass(mebibytes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            backward_pass(mebibytes)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 60 * 256
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES = HUGE.read_text() if HUGE.exists() else ""
pytestmark = pytest.mark.skipif(malloc._library() is None, reason="glibc's settings, where the user has made none")


@pytest.mark.skipif("[always]" in HUGE_PAGES, reason="huge pages: few faults, whatever the settings")
@pytest.mark.parametrize(("how", "fewest", "most"), [("as it is", PAGES // 4, 10 * PAGES), ("kept", 0, PAGES // 100)])
def test_freed_memory_is_used_again_without_page_faults(how: str, fewest: int, most: int):
    environment = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], env=environment, capture_output=True, text=True)
    faults = [int(line) for line in done.stdout.split()]
    assert len(faults) == 2 and all(fewest <= count < most for count in faults), done


def test_the_users_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "131072")
            assert malloc._library.__wrapped__() is None
    assert malloc._library.__wrapped__() is not None


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
