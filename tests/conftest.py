"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.quick_end import end_quickly

REPOSITORY = Path(__file__).resolve().parent.parent

# Hundreds of processes that the tests start import the package from its sources: its bytecode is kept, whatever the
# environment says, for they would compile it again and again (a fifth of a short run's time).
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# One thread each, in this process as in those that are started: threads that wait for one another on a core that a
# second worker of pytest-xdist uses make a test take many times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test cuts the power: files need not wait for the disk.
os.fsync = lambda handle: None

# The examples are the same in every run, and a busy machine may take its time over them; `--hypothesis-profile=default`
# looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Modules and tests are no garbage: they are not searched for it while the tests run, nor afterwards."""
    gc.freeze()
    end_quickly()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets: $FEDMPI_DATA, else shared/data beside the repository; skips when there is none."""
    folder = Path(os.environ.get("FEDMPI_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (set FEDMPI_DATA)")
    return folder


@pytest.fixture(autouse=True)
def reset_log_level() -> None:
    """Runs of earlier tests set the level of fedmpi's log."""
    logging.getLogger("fedmpi").setLevel(logging.NOTSET)
    logging.getLogger("fedmpi").propagate = True
