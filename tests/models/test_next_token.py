"""Models of the next token: their sizes, what a position may see, what they predict of one class a sample."""

from __future__ import annotations

import pytest
import torch

from fedmpi import UserError
from fedmpi.data.schema import DataDescription
from fedmpi.models import build

LENGTH, VOCABULARY, BATCH = 9, 30, 3
NAMES = ("char-lstm", "word-lstm", "causal-transformer")
TOKENS = DataDescription((LENGTH,), "int32", VOCABULARY, "text", VOCABULARY, (), (), "tokens", (LENGTH,))
ONE_CLASS = DataDescription((LENGTH,), "int32", 7, "text", VOCABULARY, (), ())


def drawn() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


@pytest.mark.parametrize("name", NAMES)
def test_each_position_sees_itself_and_those_before_it_alone(name: str):
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


@pytest.mark.parametrize("name", NAMES)
def test_of_one_class_a_sample_the_last_position_predicts_it(name: str):
    model, x = build(name, {}, ONE_CLASS, seed=0).eval(), drawn()
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    assert model(x).shape == (BATCH, 7) and not torch.allclose(model(x), model(changed))


def test_the_character_model_has_the_layers_of_its_paper():
    model = build("char-lstm", {}, TOKENS, seed=0)
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)  # torch has two biases a layer
    assert sum(p.numel() for p in model.parameters()) == 8 * VOCABULARY + lstm + 257 * VOCABULARY


def test_the_word_model_has_the_layers_of_its_paper():
    model = build("word-lstm", {}, TOKENS, seed=0)
    lstm = 4 * 670 * (96 + 670 + 2)
    assert sum(p.numel() for p in model.parameters()) == 96 * VOCABULARY + lstm + 671 * 96 + 97 * VOCABULARY


@pytest.mark.parametrize("name", NAMES)
def test_other_targets_and_other_samples_are_refused(name: str):
    numbers = DataDescription((LENGTH,), "int32", 2, "text", VOCABULARY, (), (), "regression", (2,))
    with pytest.raises(UserError, match="tokens or classes"):
        build(name, {}, numbers, seed=0)
    with pytest.raises(UserError, match="reads texts"):
        build(name, {}, DataDescription((4,), "float32", 2, "vector", 0, (), ()), seed=0)


def test_heads_divide_the_vector_and_no_model_has_less_than_no_layers():
    with pytest.raises(UserError, match="model.heads = 3 does not divide model.dimension = 16"):
        build("causal-transformer", {"dimension": 16, "heads": 3}, TOKENS, seed=0)
    with pytest.raises(UserError, match="model.layers = -1 is impossible"):
        build("causal-transformer", {"layers": -1}, TOKENS, seed=0)
