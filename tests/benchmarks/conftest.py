"""The benchmarks' own tests take minutes: they run where FEDMPI_BENCHMARKS=1 asks for them (.ci/run does)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("FEDMPI_BENCHMARKS") == "1":
        return
    skipped = pytest.mark.skip(reason="takes minutes: set FEDMPI_BENCHMARKS=1")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skipped)
