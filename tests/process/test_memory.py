"""What was freed is found again without page faults, unless the user has settings of their own."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from fedmpi.process.malloc import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "kept" else None

def backward_pass():
    blocks = [np.empty(3 << 20, np.uint8) for _ in range(10)]
    for block in blocks:
        block[::4096] = 1

backward_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    backward_pass()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES = HUGE.read_text() if HUGE.exists() else ""
PAGES = 10 * 10 * 3 * 256


def run(how: str, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", PROGRAM, how]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    kept, faults = result.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
@pytest.mark.skipif("[always]" in HUGE_PAGES, reason="huge pages: few faults, whatever the settings")
def test_freed_memory_is_used_again_without_page_faults():
    assert run("as it is")[1] > PAGES // 4
    kept, faults = run("kept")
    assert kept == "True"
    assert faults < PAGES // 100


def test_the_users_own_settings_are_left_alone():
    assert run("kept", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
