"""The texts of functions that no name finds, as RUN/plugins keeps them."""

from __future__ import annotations

import linecache
import logging
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi.common.own_code import own_text
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


WHOLE = {
    "a body in the next line": "lambda client:\n    client.labels.argsort()\n",
    "a body in several lines": "lambda client: client.labels\n    .argsort()\n    [:3]\n",
    "a body after a note": "lambda client:\n    # as they come\n    client.labels.argsort()\n",
    "text in several lines": 'lambda client: """\n    {client}\n    """\n',
    "options in several lines": "lambda client, *, most=(\n    3): client.labels[:most]\n",
    "one line": "lambda client: client.labels\n",
}


@pytest.mark.parametrize("how", WHOLE)
def test_all_lines_of_a_lambda_within_brackets_are_kept(how: str) -> None:
    text = "rules = [\n" + indent(WHOLE[how], "    ").rstrip("\n") + ",\n    3,\n]\n"
    rule = typed_in(text)["rules"][0]
    assert own_text(rule) == "".join(text.splitlines(keepends=True)[1:-2])
    assert kept(rule) == own_text(rule)


def test_lines_after_a_lambda_are_not_kept() -> None:
    assert own_text(typed_in("rule = dict(a=lambda client: client,\n    b=3)['a']\nother = lambda: 1\n")["rule"]) == (
        "rule = dict(a=lambda client: client,\n"
    )


def test_a_function_that_holds_lambdas_is_kept_as_it_is() -> None:
    text = (
        "def make():\n    def rule(client):\n        return sorted((lambda: 1)(), key=lambda one: 1)\n    return rule\n"
    )
    assert kept(typed_in(text)["make"]()) == "".join(text.splitlines(keepends=True)[1:3])


def test_a_built_in_component_that_is_given_has_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        for loss in (label_smoothing, partial(label_smoothing, smoothing=0.2)):
            assert part_sources(fedmpi.Config(task={"loss": loss}, clients={"count": 4})) == {}
    assert not caplog.records


def test_a_run_does_not_continue_with_a_lambda_of_another_body_in_the_next_line(tmp_path: Path) -> None:
    rules = [
        lambda client:
            np.arange(len(client.labels)),
        lambda client:
            np.arange(len(client.labels) // 2 + 1),
    ]  # fmt: skip
    keys = {"rounds": 1, "clients.count": 4}
    fedmpi.run("fedavg", {**keys, "samples.sampler": rules[0]}, out=tmp_path)
    with pytest.raises(fedmpi.UserError, match=r"samples\.sampler.*lambda.* differs from the file"):
        fedmpi.run("fedavg", {**keys, "samples.sampler": rules[1], "rounds": 2}, out=tmp_path, resume=True)
