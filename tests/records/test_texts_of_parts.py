"""The texts of functions that no name finds, as RUN/plugins keeps them."""

from __future__ import annotations

import logging

import pytest

import fedmpi
from fedmpi.records.provenance import part_sources
from fedmpi.tasks.losses import label_smoothing


def test_a_built_in_component_that_is_given_has_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        for loss in (label_smoothing, {"name": label_smoothing, "smoothing": 0.2}):
            assert part_sources(fedmpi.Config(task={"loss": loss}, clients={"count": 4})) == {}
    assert not caplog.records


def test_a_component_in_no_file_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, object] = {"__name__": "typed_in"}
    exec("def few(client):\n    return client", names)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        assert part_sources(fedmpi.Config(samples={"sampler": names["few"]}, clients={"count": 4}), warns=True) == {}
    assert "samples.sampler = typed_in:few is in no file" in caplog.text
