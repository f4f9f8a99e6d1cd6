"""The built-in models: layers of their papers, what a position or word may see, a step on real samples, wrong data.

`test_documented.py` pins the number of parameters of each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedmpi import UserError
from fedmpi.data.schema import DataDescription
from fedmpi.models import build
from fedmpi.models.text_models import lstm, text_cnn, transformer
from tests.local.synthetic import IMAGES, SMALL_IMAGES, TEXTS
from tests.models.real_samples import describe_images, describe_texts, digits, loss_after_steps, news_titles

TEXT_MODELS = ("text-cnn", "fedsampling-text-cnn", "transformer", "lstm", "bilstm")
IMAGE_MODELS = {"mlp": 0.1, "cnn": 0.05, "cifar-cnn": 0.02, "image-cnn": 0.02, "resnet18": 0.002}
"""Name -> learning rate of the step."""
NEXT_TOKEN = ("char-lstm", "word-lstm", "causal-transformer")
LENGTH, VOCABULARY, BATCH = 9, 30, 3
TOKENS = DataDescription((LENGTH,), "int32", VOCABULARY, "text", VOCABULARY, (), (), "tokens", (LENGTH,))
ONE_CLASS = DataDescription((LENGTH,), "int32", 7, "text", VOCABULARY, (), ())
NUMBERS = DataDescription((LENGTH,), "int32", 2, "text", VOCABULARY, (), (), "regression", (2,))


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_one_step_lowers_the_loss_on_real_digits(name: str) -> None:
    channels, side = (1, 28) if name in ("mlp", "cnn", "image-cnn") else (3, 32)
    x, y = digits(32, channels, side)
    model = build(name, {}, describe_images(channels, side, 10), 1)
    before, after = loss_after_steps(model, x, y, IMAGE_MODELS[name])
    assert after < before


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_one_step_lowers_the_loss_on_real_titles(name: str) -> None:
    x, y, vocabulary = news_titles(200, 30)
    model = build(name, {}, describe_texts(30, vocabulary, int(y.max()) + 1), 1)
    before, after = loss_after_steps(model, x, y, lr=0.05)
    assert after < before


@pytest.mark.parametrize(
    ("name", "options", "description", "words"),
    [
        *[(name, {}, TEXTS, "reads images") for name in ("cnn", "cifar-cnn", "image-cnn", "resnet18")],
        *[(name, {}, describe_images(1, 28, 10), "reads texts") for name in (*TEXT_MODELS, *NEXT_TOKEN)],
        *[(name, {}, NUMBERS, "tokens or classes") for name in NEXT_TOKEN],
        *[(name, {}, SMALL_IMAGES, "too small") for name in ("cnn", "cifar-cnn", "image-cnn")],
        ("cnn", {}, replace(IMAGES, feature_shape=(28, 28, 1)), r"28 channels\? They come first"),
        ("cnn", {"dropout": 1.0}, IMAGES, "dropout"),
        ("resnet18", {"width": 48, "groups": 32}, describe_images(3, 32, 10), "divisor"),
        ("mlp", {}, TEXTS, "cannot read token ids"),
        ("mlp", {"hidden": [0]}, SMALL_IMAGES, "list of positive"),
        ("mlp", {"activation": "step"}, SMALL_IMAGES, "none of relu, tanh"),
        ("mlp", {"dropout": 1.0}, SMALL_IMAGES, r"must lie in \[0, 1\)"),
        ("text-cnn", {}, describe_texts(4, 50, 3), "widths"),
        ("text-cnn", {"vectors": "missing.npy"}, TEXTS, "missing.npy"),
        ("text-cnn", {"frozen": True}, TEXTS, "needs model.vectors"),
        ("causal-transformer", {"dimension": 16, "heads": 3}, TOKENS, "model.heads = 3 does not divide"),
        ("causal-transformer", {"layers": -1}, TOKENS, "model.layers = -1"),
    ],
)
def test_wrong_data_and_impossible_options_are_rejected(
    name: str, options: dict[str, Any], description: DataDescription, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(name, options, description, 0)


def test_layers_of_the_mlp_are_as_wide_as_asked_for_with_activation_and_dropout_after_each_hidden_one() -> None:
    layers = list(build("mlp", {"hidden": [3, 4], "activation": "tanh", "dropout": 0.1}, SMALL_IMAGES, 0))
    kinds = [nn.Flatten, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear, nn.Tanh, nn.Dropout, nn.Linear]
    assert [type(layer) for layer in layers] == kinds
    assert [tuple(layers[place].weight.shape) for place in (1, 4, 7)] == [(3, 36), (4, 3), (5, 4)]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 20, 44)])
def test_the_cnn_takes_other_image_sizes_and_drops_after_its_first_two_convolutions(shape: tuple[int, ...]) -> None:
    model = build("cnn", {}, replace(IMAGES, feature_shape=shape), 0)
    kinds = [type(layer) for layer in model if isinstance(layer, nn.Conv2d | nn.Dropout)]
    assert kinds == [nn.Conv2d, nn.Dropout, nn.Conv2d, nn.Dropout, nn.Conv2d]
    assert model.eval()(torch.zeros(2, *shape)).shape == (2, 47)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_given_word_vectors_are_used_and_trained_unless_they_are_frozen(name: str, frozen: bool, tmp_path: Any) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 12)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    options = {"vectors": str(tmp_path / "vectors.npy"), "frozen": frozen}
    model = build(name, options, describe_texts(8, 50, 3), 0)
    np.testing.assert_array_equal(model.words(torch.arange(50)).detach().numpy(), vectors)
    assert frozen != any(p.shape == (50, 12) for p in model.parameters())
    assert frozen != any("words" in key for key in model.state_dict())


def test_a_vector_file_for_another_vocabulary_is_named(tmp_path: Any) -> None:
    np.save(tmp_path / "short.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(UserError, match="short.npy"):
        text_cnn(TEXTS, vectors=str(tmp_path / "short.npy"))


def test_the_lstm_reads_up_to_the_last_word_and_ignores_the_padding() -> None:
    torch.manual_seed(0)
    model, padded = lstm(describe_texts(9, 50, 3)).eval(), nn.ConstantPad1d((0, 5), 0)
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


def test_the_bag_of_words_is_a_dense_layer_on_the_shares_of_known_words() -> None:
    model = build("bag-of-words", {}, describe_texts(7, 12, 3), 0).double()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.5, -1.0, 2.0]))
    tokens = torch.randint(0, 12, (50, 7), generator=torch.Generator().manual_seed(0))
    tokens[0] = 0
    counts = functional.one_hot(tokens, 12).double().sum(1)
    shares = counts[:, 2:] / counts[:, 1:].sum(1, keepdim=True).clamp(min=1)  # id 1, any unknown word, says nothing
    torch.testing.assert_close(model(tokens), functional.linear(shares, model.weight.T, model.bias))
    assert model(tokens)[0].tolist() == [0.5, -1.0, 2.0]


def test_weights_of_the_bag_of_words_begin_by_glorot_normal() -> None:
    """Standard deviation √(2 / (V + C)) of V = 600 words and C = 200 classes, 0.05."""
    model = build("bag-of-words", {}, describe_texts(7, 602, 200), 0)
    assert model.weight.shape == (600, 200) and not model.bias.any()
    assert abs(model.weight.std().item() - 0.05) < 5e-4 and abs(model.weight.mean().item()) < 1e-3


def drawn() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_each_position_sees_itself_and_those_before_it_alone(name: str) -> None:
    model, x = build(name, {}, TOKENS, seed=0).eval(), drawn()
    with torch.no_grad():
        whole = model(x)
        assert whole.shape == (BATCH, LENGTH, VOCABULARY)
        for place in (0, 4, LENGTH - 1):
            changed = x.clone()
            changed[:, place] = (changed[:, place] + 1) % VOCABULARY
            after = model(changed)
            assert torch.allclose(whole[:, :place], after[:, :place], atol=1e-5)
            assert not torch.allclose(whole[:, place], after[:, place], atol=1e-5)


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_of_one_class_a_sample_the_last_position_predicts_it(name: str) -> None:
    model, x = build(name, {}, ONE_CLASS, seed=0).eval(), drawn()
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    assert model(x).shape == (BATCH, 7) and not torch.allclose(model(x), model(changed))
