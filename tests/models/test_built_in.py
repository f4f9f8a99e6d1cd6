"""The built-in models: their layers, what they read and reject, what the documentation says; models by import path."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmpi import ComponentFailure, UserError, components
from fedmpi.data.schema import DataDescription
from fedmpi.models import build, check_model_options
from fedmpi.models.text_models import lstm, transformer
from tests.local.synthetic import IMAGES, SMALL_IMAGES, TEXTS

TEXT_MODELS = ("text-cnn", "fedsampling-text-cnn", "transformer", "lstm")
IMAGE_MODELS = ("mlp", "cnn", "cifar-cnn", "image-cnn", "resnet18")
LENGTH, VOCABULARY, BATCH = 9, 30, 3
TOKENS = DataDescription((LENGTH,), "int32", VOCABULARY, "text", VOCABULARY, (), (), "tokens", (LENGTH,))
NUMBERS = DataDescription((LENGTH,), "int32", 2, "text", VOCABULARY, (), (), "regression", (2,))
COLORED = DataDescription((3, 32, 32), "uint8", 10, "image", 0, (0.5,) * 3, (0.25,) * 3)
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w-]+)` \| ([\d,]+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
ROWS = {name: row for name, *row in ROW.findall(PAGE)}
WRONG_OPTIONS = {"hidden": [0], "activation": "step", "dropout": 1.0}
MODELS = {part.name: part for part in components("model")}


def described(data: str) -> DataDescription:
    """The data of a row of the page."""
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", data)]
    if data.startswith("text"):
        length, vocabulary, classes = numbers
        return DataDescription((length,), "int32", classes, "text", vocabulary, (), ())
    *shape, classes = numbers
    return DataDescription(tuple(shape), "uint8", classes, "image", 0, (0.5,) * shape[0], (0.5,) * shape[0])


def samples(description: DataDescription, count: int = 4) -> torch.Tensor:
    draws, shape = torch.Generator().manual_seed(1), (count, *description.feature_shape)
    if description.task == "text":
        return torch.randint(1, description.vocabulary, shape, generator=draws)
    return torch.randn(shape, generator=draws)


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_the_number_of_parameters_and_the_options_of_each_model_which_all_are_used(name: str) -> None:
    assert list(ROWS) == list(MODELS) and re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE) == list(MODELS)
    count, data, options = ROWS[name]
    description = described(data)
    model = build(name, {}, description, 0)
    assert f"{sum(p.numel() for p in model.parameters()):,}" == count
    found = {option: field.default for option, field in MODELS[name].fields.items()}
    written = {key: json.loads(value) for key, value in re.findall(r"`(\w+)` (\[.*?\]|\".*?\"|[\d.]+|false)", options)}
    written |= {"vectors": None, "frozen": False} if "vectors" in found else {}
    assert written == {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    model(samples(description)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize(
    ("name", "options", "description", "words"),
    [
        *[(name, {}, TEXTS, "reads images") for name in IMAGE_MODELS[1:]],
        *[(name, {}, IMAGES, "reads texts") for name in (*TEXT_MODELS, "char-lstm")],
        *[(name, {}, SMALL_IMAGES, "too small") for name in IMAGE_MODELS[1:4]],
        *[(name, {"no_such_option": 1}, TEXTS, "no_such_option") for name in MODELS],
        ("char-lstm", {}, NUMBERS, "tokens or classes"),
        ("cnn", {}, replace(IMAGES, feature_shape=(28, 28, 1)), r"28 channels\? They come first"),
        ("cnn", {"dropout": 1.0}, IMAGES, "dropout"),
        ("resnet18", {"width": 48, "groups": 32}, COLORED, "divisor"),
        ("mlp", {}, TEXTS, "cannot read token ids"),
        *[("mlp", {key: wrong}, SMALL_IMAGES, f"model.{key} = ") for key, wrong in WRONG_OPTIONS.items()],
        ("text-cnn", {"widths": [13]}, TEXTS, "widths"),
        ("text-cnn", {"vectors": "missing.npy"}, TEXTS, "missing.npy"),
        ("text-cnn", {"frozen": True}, TEXTS, "Set model.vectors"),
        ("mpl", {}, SMALL_IMAGES, "did you mean mlp"),
    ],
)
def test_wrong_data_and_impossible_options_are_rejected(
    name: str, options: dict[str, Any], description: DataDescription, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(name, options, description, 0)


def test_activation_and_dropout_follow_each_hidden_layer_of_the_mlp_and_two_convolutions_of_the_cnn() -> None:
    layers = list(build("mlp", {"hidden": [3, 4], "activation": "tanh", "dropout": 0.1}, SMALL_IMAGES, 0))
    kinds = [nn.Flatten, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear]
    assert [type(layer) for layer in layers] == kinds
    assert [tuple(layers[place].weight.shape) for place in (1, 4, 7)] == [(3, 36), (4, 3), (5, 4)]
    wide = (1, 20, 44)
    model = build("cnn", {}, replace(IMAGES, feature_shape=wide), 0)
    kinds = [type(layer) for layer in model if isinstance(layer, nn.Conv2d | nn.Dropout)]
    assert kinds == [nn.Conv2d, nn.Dropout, nn.Conv2d, nn.Dropout, nn.Conv2d]
    assert model.eval()(torch.zeros(2, *wide)).shape == (2, 47)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_given_word_vectors_are_used_and_trained_unless_they_are_frozen(name: str, frozen: bool, tmp_path: Any) -> None:
    vectors = np.random.default_rng(0).normal(size=(TEXTS.vocabulary, 12)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    np.save(tmp_path / "short.npy", vectors[:3])
    model = build(name, {"vectors": str(tmp_path / "vectors.npy"), "frozen": frozen}, TEXTS, 0)
    np.testing.assert_array_equal(model.words(torch.arange(TEXTS.vocabulary)).detach().numpy(), vectors)
    assert frozen != any(p.shape == vectors.shape for p in model.parameters())
    assert frozen != any("words" in key for key in model.state_dict())
    with pytest.raises(UserError, match="short.npy"):
        build(name, {"vectors": str(tmp_path / "short.npy")}, TEXTS, 0)


def test_the_lstm_reads_up_to_the_last_word_and_ignores_the_padding() -> None:
    torch.manual_seed(0)
    model, padded = lstm(TEXTS).eval(), nn.ConstantPad1d((0, 5), 0)
    text, gap = torch.tensor([[4, 7, 2, 9]]), torch.tensor([[4, 0, 7, 9]])
    torch.testing.assert_close(model(padded(text)), model(text))
    torch.testing.assert_close(model(padded(gap)), model(gap))
    assert not torch.allclose(model(gap), model(torch.tensor([[4, 0, 7, 5]])))
    assert torch.isfinite(model(torch.zeros(1, 9, dtype=torch.int64))).all()


def test_attention_weighs_every_word_by_every_other() -> None:
    """The heads equal the formula softmax(Q Kᵀ / √20) V written out."""
    torch.manual_seed(0)
    attention, words = transformer(TEXTS).attention, torch.randn(2, 6, 300)
    query, key, value = (p(words).view(2, 6, 20, 20) for p in (attention.query, attention.key, attention.value))
    weights = (torch.einsum("nqhs,nkhs->nhqk", query, key) / 20**0.5).softmax(-1)
    expected = torch.einsum("nhqk,nkhs->nqhs", weights, value).reshape(2, 6, 400)
    torch.testing.assert_close(attention(words), expected)


@pytest.mark.parametrize("place", [0, 4, LENGTH - 1])
def test_the_character_model_sees_a_position_and_those_before_it_and_predicts_one_class_from_the_last(
    place: int,
) -> None:
    x = samples(TOKENS, BATCH)
    changed = x.clone()
    changed[:, place] = (changed[:, place] + 1) % VOCABULARY
    model = build("char-lstm", {}, TOKENS, seed=0).eval()
    whole, after = model(x), model(changed)
    assert whole.shape == (BATCH, LENGTH, VOCABULARY)
    assert torch.allclose(whole[:, :place], after[:, :place], atol=1e-5)
    assert not torch.allclose(whole[:, place], after[:, place], atol=1e-5)
    once = build("char-lstm", {}, replace(TOKENS, classes=7, targets="classification", target_shape=()), seed=0)
    assert once(x).shape == (BATCH, 7) and not torch.allclose(once(x), once(changed))
    x[:, -1] = 0  # a character like any other
    assert not torch.allclose(once(x), once(x[:, :-1]))


def test_the_same_seed_gives_the_same_weights_whatever_torchs_generator_does() -> None:
    found = []
    for seed, before in ((5, 1), (5, 2), (6, 1)):
        torch.manual_seed(before)
        state = torch.get_rng_state()
        found.append(nn.utils.parameters_to_vector(build("mlp", {}, SMALL_IMAGES, seed).parameters()))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_what_makes_no_model_is_named() -> None:
    with pytest.raises(UserError, match="importing the module 'my_missing_models' failed"):
        build("my_missing_models:net", {}, SMALL_IMAGES, 0)
    with pytest.raises(UserError, match="is called with description, which it does not take"):
        build(lambda: nn.Linear(2, 2), {}, SMALL_IMAGES, 0)
    with pytest.raises(ComponentFailure, match=r"test_built_in.py:\d+\) failed: it returned int"):
        build(lambda description: 3, {}, SMALL_IMAGES, 0)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_module_takes_no_options_and_must_have_a_copy() -> None:
    with pytest.raises(UserError, match="model.hidden has no effect on a model that is given as a module"):
        check_model_options(nn.Linear(2, 2), {"hidden": [3], "lora": None})
    with pytest.raises(UserError, match="Linear cannot be copied"):
        build(nn.utils.weight_norm(nn.Linear(36, 5)), {}, SMALL_IMAGES, seed=0)
