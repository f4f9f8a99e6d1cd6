"""The registry of components: names, options, marks, and messages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from fedmpi import ClientFailure, ComponentFailure, UserError, aggregator, client_sampler, components
from fedmpi.common import registry
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.options import type_text
from fedmpi.common.registry import Component, describe, register, resolve


@client_sampler(needs=("loss",))
def loudest(view: Any, *, keep: float = 0.5, how: Literal["last", "mean"] = "last", top: int | None = None) -> Any:
    """The clients with the highest last loss. The rest at random.

    Parameters
    ----------
    view : View
    keep : float
        Share of the draws that
        goes to the loudest.
    """
    return keep, how, top


class Measured:
    """Two stages."""

    def __init__(self, *, candidates: int, spans: tuple[float, ...] = ()):
        self.candidates, self.spans = candidates, spans


def test_a_decorated_function_stays_the_function_and_carries_its_marks() -> None:
    assert loudest(None, keep=0.1) == (0.1, "last", None)
    part = resolve("client sampler", loudest)
    assert part.object is loudest and part.marks == {"needs": ("loss",), "measures": ()}
    assert part.name.endswith("test_registry:loudest") and part.foreign and part.source == Path(__file__).resolve()
    assert part.title == "The clients with the highest last loss."


def test_options_are_the_keyword_only_parameters_with_default_type_and_line() -> None:
    found = resolve("client sampler", loudest).fields
    assert {name: (field.default, type_text(field.annotation), field.description) for name, field in found.items()} == {
        "keep": (0.5, "float", "Share of the draws that goes to the loudest."),
        "how": ("last", "'last' | 'mean'", ""),
        "top": (None, "int | None", ""),
    }
    assert resolve("client sampler", Measured).fields["candidates"].is_required()


def test_a_function_is_made_with_its_options_bound_and_a_class_as_an_instance() -> None:
    made = resolve("client sampler", loudest).make({"keep": 1, "top": 3})
    assert made(None) == (1.0, "last", 3) and isinstance(made(None)[0], float)
    instance = resolve("client sampler", Measured).make({"candidates": 7, "spans": [1, 2]})
    assert (instance.candidates, instance.spans) == (7, (1.0, 2.0))


def test_a_missing_option_is_named_after_wrong_ones() -> None:
    with pytest.raises(UserError, match=r"clients\.sampler\.kandidates is unknown .*did you mean candidates"):
        resolve("client sampler", Measured).make({"kandidates": 3})
    with pytest.raises(UserError, match=r"Measured. needs clients\.sampler\.candidates"):
        resolve("client sampler", Measured).make({})

    def of_both(view: Any, *, first: int, second: int) -> Any:
        return view

    both = r"needs clients\.sampler\.first and clients\.sampler\.second, without a default"
    with pytest.raises(UserError, match=both):
        resolve("client sampler", of_both).make({})


def test_ranges_are_part_of_a_type_and_an_unknown_type_is_not_checked() -> None:
    def ranged(view: Any, *, share: Annotated[float, Field(gt=0)] = 0.5, free: "Unheard" = None, bare=1) -> Any:  # type: ignore[name-defined,no-untyped-def]  # noqa: F821, UP037
        return share, free, bare

    with pytest.raises(UserError, match=r"share = 0 .* greater than 0"):
        resolve("client sampler", ranged).make({"share": 0})
    assert resolve("client sampler", ranged).make({"free": [1], "bare": "x"})(None) == (0.5, [1], "x")


def test_a_foreign_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open_house_one.py").write_text(
        "from fedmpi import client_sampler, weights\n\n"
        "@client_sampler\ndef mine(view, *, keep: float = 0.5):\n    'Mine.'\n\n"
        "@weights(per_sample=True)\ndef root(cohort, sizes):\n    return sizes\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    part = resolve("client sampler", "open_house_one:mine")
    assert part.name == "open_house_one:mine" and part.source == (tmp_path / "open_house_one.py").resolve()
    assert resolve("weights", "open_house_one:root").marks["per_sample"] is True
    assert describe("open_house_one:root").kind == "weights"
    with pytest.raises(UserError, match=r"clients\.sampler = .*root' is a weights. .* chooses a client sampler"):
        resolve("client sampler", "open_house_one:root")
    with pytest.raises(UserError, match="no function or class 'mime': did you mean mine"):
        resolve("client sampler", "open_house_one:mime")


def test_names_that_do_not_exist_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    components("aggregator")  # the built-in ones register before the table is replaced
    monkeypatch.setitem(registry._BUILT_IN, "aggregator", {})
    register("aggregator", "median")(lambda updates, coefficients: updates)
    with pytest.raises(UserError, match=r"server\.aggregator = 'mediam' is unknown: did you mean median\?"):
        resolve("aggregator", "mediam")
    with pytest.raises(UserError, match=r"'no_such_module_here' failed.*: searched are PYTHONPATH and the work"):
        resolve("aggregator", "no_such_module_here:thing")
    with pytest.raises(ValueError, match="give a name"):
        Component.read("aggregator", 3, "mean")
    with pytest.raises(UserError, match="needs = 'los' is unknown. Choose from loss"):
        client_sampler(needs=("los",))


def test_built_in_components_are_listed_and_known_by_name_when_given_as_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    components("aggregator")
    monkeypatch.setitem(registry._BUILT_IN, "aggregator", {})

    @aggregator(name="halves")
    def halves(updates: Any, coefficients: Any, *, at: float = 0.5) -> Any:
        """Half of it."""

    assert [(part.name, part.title, part.source) for part in components("aggregator")] == [
        ("halves", "Half of it.", None)
    ]
    assert resolve("aggregator", halves).name == "halves" and not resolve("aggregator", halves).foreign
    assert describe("halves").kind == "aggregator"
    with pytest.raises(UserError, match="there is no component 'halfs': did you mean halves"):
        describe("halfs")


def test_an_unknown_kind_is_rejected_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match="there is no kind of component 'samplers': did you mean data sampler?"):
        components("samplers")
    with pytest.raises(UserError, match="there is no kind of component '': there are client sampler, data sampler"):
        components("")


def test_what_a_component_raises_names_component_line_round_and_client() -> None:
    part = resolve("client sampler", loudest)
    with pytest.raises(ComponentFailure) as caught, calling(part, round=3, client=7):
        raise ZeroDivisionError("by nothing")
    message = str(caught.value)
    assert message.startswith(f"the client sampler {part.name} ({Path(__file__).resolve()}:")
    assert message.endswith("failed in round 3, client 7: ZeroDivisionError: by nothing")
    assert 'raise ZeroDivisionError("by nothing")' in caught.value.trace


@pytest.mark.parametrize("error", [UserError("x"), ClientFailure(1, 0, ValueError("x"))])
def test_errors_that_speak_for_themselves_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, calling(resolve("client sampler", loudest)):
        raise error
    assert caught.value is error


def test_a_useless_result_is_reported_like_a_failure() -> None:
    failure = refuse_result(resolve("client sampler", loudest), "returned a list: return a fedmpi.Cohort", round=2)
    assert re.search(r"test_registry.py:\d+\) failed in round 2: returned a list", str(failure))
