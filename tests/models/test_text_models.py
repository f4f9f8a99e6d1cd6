"""The text models of the papers: their sizes follow from their layers, a step on real titles lowers the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmpi import UserError
from fedmpi.models.bilstm import bilstm, lstm
from fedmpi.models.text_cnn import fedsampling_text_cnn, text_cnn
from fedmpi.models.transformer import transformer
from tests.models.real_samples import describe_images, describe_texts, loss_after_steps, news_titles

TEXT_MODELS = {
    "text-cnn": text_cnn,
    "fedsampling-text-cnn": fedsampling_text_cnn,
    "transformer": transformer,
    "lstm": lstm,
    "bilstm": bilstm,
}
VOCABULARY, LENGTH, CLASSES = 5000, 30, 5
TEXTS = describe_texts(LENGTH, VOCABULARY, CLASSES)


def dense(inputs: int, outputs: int) -> int:
    return outputs * (inputs + 1)


def recurrent(inputs: int, units: int) -> int:
    return 4 * units * (inputs + units + 2)


def head(width: int) -> int:
    return width + dense(width, 256) + dense(256, 256) + dense(256, CLASSES)


EXPECTED = {
    "text-cnn": 64 * VOCABULARY + sum(dense(64 * width, 64) for width in (3, 4, 5)) + dense(3 * 64, CLASSES),
    "fedsampling-text-cnn": 300 * VOCABULARY + dense(3 * 300, 400) + head(400),
    "transformer": 300 * VOCABULARY + 3 * 300 * 400 + head(400),
    "lstm": 100 * VOCABULARY + recurrent(100, 128) + dense(128, CLASSES),
    "bilstm": 300 * VOCABULARY + 2 * recurrent(300, 200) + head(400),
}


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_number_of_parameters_follows_from_the_layers(name: str):
    assert sum(p.numel() for p in TEXT_MODELS[name](TEXTS).parameters()) == EXPECTED[name]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_one_step_lowers_the_loss_on_real_titles(name: str):
    torch.manual_seed(1)
    x, y, vocabulary = news_titles(200, LENGTH)
    model = TEXT_MODELS[name](describe_texts(LENGTH, vocabulary, int(y.max()) + 1))
    before, after = loss_after_steps(model, x, y, lr=0.05)
    assert after < before


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_frozen_word_vectors_are_used_and_never_trained(name: str, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(50, 12)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    options = {"vectors": str(tmp_path / "vectors.npy"), "frozen": True}
    model = TEXT_MODELS[name](describe_texts(8, 50, 3), **options)
    np.testing.assert_array_equal(model.words(torch.arange(50)).numpy(), vectors)
    assert all(p.shape != (50, 12) for p in model.parameters())
    assert not any("words" in key for key in model.state_dict())


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_given_word_vectors_are_the_start_of_training(name: str, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(50, 12)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    model = TEXT_MODELS[name](describe_texts(8, 50, 3), vectors=str(tmp_path / "vectors.npy"))
    assert model.words.weight.requires_grad
    np.testing.assert_array_equal(model.words.weight.detach().numpy(), vectors)


def test_the_lstm_reads_up_to_the_last_word_and_ignores_the_padding():
    torch.manual_seed(0)
    model = lstm(describe_texts(9, 50, 3)).eval()
    text = torch.tensor([[4, 7, 2, 9]])
    padded = torch.nn.functional.pad(text, (0, 5))
    torch.testing.assert_close(model(padded), model(text))
    gap = torch.tensor([[4, 0, 7, 9]])
    torch.testing.assert_close(model(torch.nn.functional.pad(gap, (0, 5))), model(gap))
    assert not torch.allclose(model(gap), model(torch.tensor([[4, 0, 7, 5]])))
    assert torch.isfinite(model(torch.zeros(1, 9, dtype=torch.int64))).all()


def test_attention_weighs_every_word_by_every_other():
    """The heads equal the formula softmax(Q Kᵀ / √20) V written out."""
    torch.manual_seed(0)
    attention = transformer(TEXTS).attention
    words = torch.randn(2, 6, 300)
    query, key, value = (p(words).view(2, 6, 20, 20) for p in (attention.query, attention.key, attention.value))
    weights = (torch.einsum("nqhs,nkhs->nhqk", query, key) / 20**0.5).softmax(-1)
    expected = torch.einsum("nhqk,nkhs->nqhs", weights, value).reshape(2, 6, 400)
    torch.testing.assert_close(attention(words), expected)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_images_are_refused(name: str):
    with pytest.raises(UserError, match="reads texts"):
        TEXT_MODELS[name](describe_images(1, 28, 10))


def test_a_wrong_vector_file_is_named(tmp_path):
    np.save(tmp_path / "short.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(UserError, match="short.npy"):
        text_cnn(TEXTS, vectors=str(tmp_path / "short.npy"))
    with pytest.raises(UserError, match="missing.npy"):
        text_cnn(TEXTS, vectors=str(tmp_path / "missing.npy"))
    with pytest.raises(UserError, match="needs model.vectors"):
        text_cnn(TEXTS, frozen=True)


def test_filters_wider_than_the_text_are_refused():
    with pytest.raises(UserError, match="widths"):
        text_cnn(describe_texts(4, 50, 3))
