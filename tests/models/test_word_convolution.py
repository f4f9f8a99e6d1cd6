"""Convolutions over words where they lie, beside torch's own; the maximum over time beside its plain words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.networks import PlainMaxOverTime
from fedmpi.models.flat import FlatModel
from fedmpi.models.text_layers import MaxOverTime
from fedmpi.models.word_convolution import WordConvolution, install_word_convolutions, remove_word_convolutions

KINDS: dict[str, Callable[[], nn.Conv1d]] = {
    "plain": lambda: nn.Conv1d(6, 5, 3),
    "no bias": lambda: nn.Conv1d(6, 5, 4, bias=False),
    "same": lambda: nn.Conv1d(6, 5, 3, padding="same"),
    "same, even": lambda: nn.Conv1d(6, 5, 4, padding="same"),
    "padded": lambda: nn.Conv1d(6, 5, 3, padding=2),
    "stride": lambda: nn.Conv1d(6, 5, 2, stride=3),
    "dilation": lambda: nn.Conv1d(6, 5, 3, dilation=2, padding=1),
    "one word": lambda: nn.Conv1d(6, 5, 1),
}


class Texts(nn.Module):
    """A convolution over words, and whatever else a text model may hold."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.layer(words.transpose(1, 2))
        return found


def with_gradients(module: nn.Module, words: Tensor) -> list[Tensor]:
    """The output on words (n, L, E), and the gradients of the words and of all values."""
    words = words.clone().requires_grad_()
    output = module(words)
    pull = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * pull).sum(), [words, *module.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_convolution_that_torch_computes(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module, words = Texts(KINDS[kind]()).to(dtype), torch.randn(4, 9, 6, dtype=dtype)
    before = with_gradients(module, words)
    install_word_convolutions(module)
    install_word_convolutions(module)
    assert type(module.layer) is WordConvolution
    small = 1e-12 if dtype == torch.float64 else 1e-5
    for given in (words, words.transpose(1, 2).contiguous().transpose(1, 2)):  # word by word, and value by value
        for one, other in zip(with_gradients(module, given), before, strict=True):
            torch.testing.assert_close(one, other, rtol=small, atol=small)
    assert module(words).stride(1) == 1, "the values of a word are adjacent after it, too"
    remove_word_convolutions(module)
    assert type(module.layer) is nn.Conv1d
    assert all(torch.equal(*pair) for pair in zip(with_gradients(module, words), before, strict=True))


def test_a_single_text_without_an_axis_of_samples_is_convolved_too() -> None:
    module, words = Texts(nn.Conv1d(6, 5, 3)), torch.randn(9, 6)
    expected = module.layer(words.t())
    install_word_convolutions(module)
    assert torch.equal(module.layer(words.t()), expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 6, 3, groups=2),
        nn.Conv1d(6, 5, 3, padding=1, padding_mode="circular"),
        type("Own", (nn.Conv1d,), {})(6, 5, 3),
        nn.Conv2d(6, 5, 3),
        nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 5, 3)),
    ],
)
def test_other_layers_stay_what_they_are(layer: nn.Module) -> None:
    kind = type(layer)
    install_word_convolutions(Texts(layer))
    assert type(layer) is kind


def test_a_model_gets_its_own_layers_back() -> None:
    model = FlatModel(Texts(nn.Conv1d(6, 5, 3)))
    assert type(model.module.layer) is WordConvolution
    assert type(model.released().layer) is nn.Conv1d


@pytest.mark.parametrize("texts", [0, 1, 7])
def test_the_maximum_over_time_and_its_gradient(texts: int) -> None:
    """Words that are small whole numbers make many equal features: the first of them has the gradient."""
    torch.manual_seed(2)
    module = MaxOverTime(3, 4, (1, 2, 3)).double()
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randint(-1, 2, value.shape))
    words = torch.randint(-1, 2, (texts, 8, 3)).double()
    found = with_gradients(module, words)
    module.__class__ = PlainMaxOverTime
    for one, other in zip(found, with_gradients(module, words), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
