"""A shard that is cut off while it is mapped ends a command with a sentence and exit code 1, not with a signal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedmpi.data import source
from fedmpi.data.opening import open_store
from fedmpi.process.lost_pages import PLAIN, report_lost_pages
from tests.data_prep.command import main


@pytest.mark.parametrize("watched", [True, False])
def test_a_mapping_that_lost_its_pages_is_said_in_a_sentence(tmp_path: Path, watched: bool):
    data, said = tmp_path / "digits", tmp_path / "said"
    words = "digits --partition iid --clients 3 --shards 1 --seed 0 --out"
    assert main([*words.split(), str(data)]) == 0
    child = os.fork()
    if not child:
        try:
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            store = open_store(data)
            source.DataWatch.latest = source.DataWatch(store) if watched else None
            report_lost_pages()
            store.client(0)
            os.truncate(data / "train-00000.h5", 0)
            print(store.client(2)[0].sum())
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    message = said.read_text()
    assert message.count("\n") == 1
    if watched:
        assert message.startswith(f"error: {data / 'train-00000.h5'} was changed since this run began (0 bytes, ")
    else:
        assert message == f"error: {PLAIN}\n"
