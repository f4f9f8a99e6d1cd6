"""One watcher a module: runs that several statements look at are made once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.keys.watched import Watcher


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    """Runs into folders of this module."""
    log = logging.getLogger("fedmpi")
    handlers, propagate = log.handlers[:], log.propagate
    log.propagate = False
    yield Watcher(tmp_path_factory.mktemp("watched"))
    log.handlers, log.propagate = handlers, propagate
