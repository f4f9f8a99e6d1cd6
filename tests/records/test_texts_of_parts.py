"""The texts of functions that no name finds, as RUN/plugins keeps them."""

from __future__ import annotations

import linecache
import logging
from typing import Any

import pytest

import fedmpi
from fedmpi.records.provenance import part_sources
from fedmpi.tasks.losses import label_smoothing

FILE = "<typed in by a test>"


def typed_in(text: str) -> dict[str, Any]:
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec(compile(text, FILE, "exec"), names)
    return names


def kept(rule: Any) -> str:
    config = fedmpi.Config(samples={"sampler": rule}, clients={"count": 4})
    (text,) = part_sources(config).values()
    return text.decode()


def test_a_function_that_holds_lambdas_is_kept_as_it_is() -> None:
    text = (
        "def make():\n    def rule(client):\n        return sorted((lambda: 1)(), key=lambda one: 1)\n    return rule\n"
    )
    assert kept(typed_in(text)["make"]()) == "".join(text.splitlines(keepends=True)[1:3])


def test_a_built_in_component_that_is_given_has_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        for loss in (label_smoothing, {"name": label_smoothing, "smoothing": 0.2}):
            assert part_sources(fedmpi.Config(task={"loss": loss}, clients={"count": 4})) == {}
    assert not caplog.records
