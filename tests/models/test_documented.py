"""docs/reference/models.md lists every registered model, its parameters and the defaults of its options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fedmpi import components
from fedmpi.models import build
from tests.models.real_samples import describe_images, describe_texts

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
ROWS = {
    match["name"]: match
    for match in re.finditer(
        r"^\| `(?P<name>[\w-]+)` \| (?P<count>[\d,]+) \| (?P<data>.*?) \| (?P<options>.*?) \|$", PAGE, re.MULTILINE
    )
}
MODELS = {part.name: part for part in components("model")}
OF_ALL_TEXT_MODELS = {"vectors": None, "frozen": False}


def described(data: str):
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", data)]
    if data.startswith("text"):
        return describe_texts(*numbers)
    channels, height, width, classes = numbers
    assert height == width
    return describe_images(channels, height, classes)


def test_every_registered_model_is_in_both_tables_and_no_other():
    assert list(ROWS) == list(MODELS)
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE) == 2 * list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_documented_number_of_parameters_is_that_of_the_model(name: str):
    model = build(name, {}, described(ROWS[name]["data"]), 0)
    assert f"{sum(p.numel() for p in model.parameters()):,}" == ROWS[name]["count"]


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_a_model_is_used(name: str):
    description = described(ROWS[name]["data"])
    model, draws = build(name, {}, description, 0), torch.Generator().manual_seed(1)
    shape = (4, *description.feature_shape)
    if description.task == "text":
        x = torch.randint(1, description.vocabulary, shape, generator=draws)
    else:
        x = torch.randn(shape, generator=draws)
    model(x).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", MODELS)
def test_the_documented_options_and_defaults_are_those_of_the_model(name: str):
    found = {option.name: option.default for option in MODELS[name].options}
    written = {
        key: json.loads(value) for key, value in re.findall(r"`(\w+)` (\[.*?\]|\".*?\"|[\d.]+)", ROWS[name]["options"])
    }
    if "vectors" in found:
        written |= OF_ALL_TEXT_MODELS
    assert written == {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
