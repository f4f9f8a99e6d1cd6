"""Functions of parameters in a forward pass: what a call does to values and to gradients, with all of its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked import forms
from fedmpi.models.stacked.graph import without_samples
from fedmpi.models.stacked.net import why_not_stackable
from fedmpi.models.stacked.trace import ROWS, Along, made_up
from tests.local.stacks import (
    CLASSES,
    COLOURED,
    IMAGES,
    TEXTS,
    Source,
    ragged_sizes,
    relative_difference,
    tasks_for,
    train,
)

STREAMS = Streams(7)
RULE = LocalRule(lr=0.05, epochs=2, batch_size=7)
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Some parameters, and a function of them and of the samples before a dense layer."""

    def __init__(self, forward: Forward, wide: int, **shapes: tuple[int, ...]):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))
        self.last, self._forward = nn.Linear(wide, CLASSES), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._forward(self, x))


def of_text(look: Forward) -> Forward:
    return lambda s, x: look(s, x.long()).mean(1)


def of_image(function: Forward) -> Forward:
    """Of eight values a sample."""
    return lambda s, x: function(s, x.flatten(1) @ s.w.T)


def of_filters(function: Forward) -> Forward:
    return lambda s, x: function(s, functional.conv2d(x, s.filters)).relu().mean((2, 3))


def scattered(s: Any, x: Tensor) -> Tensor:
    counts = torch.zeros(x.shape[0], 60, dtype=s.w.dtype)
    return counts.scatter_add(1, x.long(), s.q.expand(x.shape[0], 12)) @ s.w


def of_places(s: Any, x: Tensor) -> Tensor:
    places = functional.embedding(torch.arange(12), s.q12, padding_idx=0)
    return functional.embedding(x, s.w, padding_idx=0) + places


def unlearned(s: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        share = 2 * s.c
    return h * share + s.c


def constant(s: Any, h: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.set_grad_enabled(False):
        part = functional.layer_norm(s.square, (8,), s.c)
    return h @ part + s.c


LABELS = torch.tensor([0, 1, 0, 2, 0, 3, 0, 4])
FIRST = torch.arange(60).unsqueeze(1) == 0

TEXT_FUNCTIONS: dict[str, Forward] = {
    "embedding": of_text(lambda s, x: functional.embedding(x, s.w)),
    "embedding, padding": of_text(lambda s, x: functional.embedding(x, s.w, padding_idx=0)),
    "embedding, padding 2": of_text(lambda s, x: functional.embedding(x, s.w, padding_idx=2)),
    "embedding, padding last": of_text(lambda s, x: functional.embedding(x, s.w, padding_idx=-1)),
    "embedding, padding by place": of_text(lambda s, x: functional.embedding(x, s.w, 0)),
    "embedding of int32": lambda s, x: functional.embedding(x, s.w, 0).mean(1),
    "embedding, named": of_text(lambda s, x: functional.embedding(input=x, weight=s.w, padding_idx=0, sparse=False)),
    "embedding, computed table": of_text(lambda s, x: functional.embedding(x, 2 * s.w, 0)),
    "embedding, places": of_text(of_places),
    "torch.embedding": of_text(lambda s, x: torch.embedding(s.w, x)),
    "torch.embedding, padding": of_text(lambda s, x: torch.embedding(s.w, x, 0)),
    "bags": lambda s, x: functional.embedding_bag(x.long(), s.w),
    "bags, padding": lambda s, x: functional.embedding_bag(x.long(), s.w, padding_idx=0),
    "bags, largest": lambda s, x: functional.embedding_bag(x.long(), s.w, mode="max", padding_idx=0),
    "bags, weighed": lambda s, x: functional.embedding_bag(
        x.long(), s.w, mode="sum", per_sample_weights=s.q.expand(x.shape[0], 12)
    ),
    "indices": of_text(lambda s, x: s.w[x]),
    "index_select": lambda s, x: s.w.index_select(0, x.flatten().long()).view(-1, 12, 8).mean(1),
    "gather": of_text(lambda s, x: s.w.expand(x.shape[0], 60, 8).gather(1, x.unsqueeze(2).expand(-1, -1, 8))),
    "take": lambda s, x: torch.take(s.w, x.long()[:, :8]),
    "one_hot": of_text(lambda s, x: functional.one_hot(x, 60).to(s.w.dtype) @ s.w),
    "scatter_add": scattered,
    "index_fill": of_text(lambda s, x: s.w.index_fill(0, torch.tensor([0]), 0.0)[x]),
    "index_copy": of_text(lambda s, x: s.w.index_copy(0, torch.tensor([0]), s.c.unsqueeze(0))[x]),
    "index_put": of_text(lambda s, x: s.w.index_put((torch.tensor([0, 0]),), s.c, accumulate=True)[x]),
    "masked_fill": of_text(lambda s, x: s.w.masked_fill(FIRST, 0.0)[x]),
    "masked_scatter": of_text(lambda s, x: s.w.masked_scatter(FIRST, s.c)[x]),
    "where": of_text(lambda s, x: torch.where(x.unsqueeze(2) == 0, s.c, s.w[x])),
    "largest of equals": lambda s, x: s.w[x.long()].max(1)[0] + s.w[x.long()].amax(1),
    "median": lambda s, x: s.w[x.long()].median(1)[0],
    "sorted": of_text(lambda s, x: s.w.sort(0)[0][x] + s.w.sort(0).values[x]),
    "topk": of_text(lambda s, x: s.w[x] + s.w.relu().topk(3, 0)[0].sum(0)),
    "renorm": of_text(lambda s, x: torch.renorm(s.w, 2, 0, 0.5)[x]),
    "distances": lambda s, x: torch.cdist(s.w[x.long()].mean(1), s.w)[:, :8],
    "norm of zeros": of_text(lambda s, x: s.w[x] + (0 * s.c).norm()),
    "normalize": of_text(lambda s, x: functional.normalize(s.w, dim=1)[x]),
}
IMAGE_FUNCTIONS: dict[str, Forward] = {
    "linear": lambda s, x: functional.linear(x.flatten(1), s.w, s.c),
    "clamped": lambda s, x: functional.linear(x.flatten(1), s.w.clamp(-0.1, 0.1)),
    "signs": lambda s, x: functional.linear(x.flatten(1), s.w + (s.w.sign() - s.w).detach()),
    "detached": of_image(lambda s, h: h * (2 * s.c.detach()) + s.c),
    "no gradient": of_image(unlearned),
    "no gradient of a product": of_image(constant),
    "fake_quantize": lambda s, x: x.flatten(1) @ torch.fake_quantize_per_tensor_affine(s.w, 0.1, 0, -8, 7).T,
    "prelu": of_image(lambda s, h: functional.prelu(h, s.c)),
    "bilinear": lambda s, x: functional.bilinear(x.flatten(1)[:, :9], x.flatten(1)[:, 9:20], s.third),
    "addmm": lambda s, x: torch.addmm(s.c, x.flatten(1), s.w.T, beta=0.5, alpha=2),
    "cumprod": of_image(lambda s, h: h * s.c.cumprod(0) + s.c.relu().prod()),
    "normed with constants": of_image(
        lambda s, h: functional.batch_norm(h, torch.zeros(8).to(h.dtype), torch.ones(8).to(h.dtype), s.c, None)
    ),
    "layer_norm": of_image(lambda s, h: functional.layer_norm(h, (8,), s.c, s.c2, 0.1)),
    "torch.layer_norm": of_image(lambda s, h: torch.layer_norm(h, (8,), s.c, None, 0.1)),
    "rms_norm": of_image(lambda s, h: functional.rms_norm(h, (8,), s.c)),
    "huber_loss": of_image(lambda s, h: functional.huber_loss(h, s.c.expand_as(h), reduction="none", delta=0.3)),
    "nll_loss": of_image(lambda s, h: h + functional.nll_loss(s.w[:, :5].log_softmax(1), LABELS, ignore_index=0)),
    "cross_entropy": of_image(
        lambda s, h: h + functional.cross_entropy(s.w[:, :5], LABELS, ignore_index=0, label_smoothing=0.1)
    ),
    "binary_cross_entropy": of_image(
        lambda s, h: h + functional.binary_cross_entropy_with_logits(s.c, LABELS.to(h.dtype), pos_weight=s.c2.detach())
    ),
    "kl_div": of_image(lambda s, h: h + functional.kl_div(s.c.log_softmax(0), s.c2.softmax(0), reduction="sum")),
    "activations": of_image(lambda s, h: h + functional.celu(s.c, 0.3) + functional.softplus(s.c2, 3, 0.5)),
    "shrunk": of_image(lambda s, h: h + functional.hardshrink(s.c, 0.2) + functional.threshold(s.c2 * 1, 0.1, 0.0)),
    "spread": of_image(lambda s, h: h + s.w.std(1, correction=0) + s.w.var(1) + sum(torch.var_mean(s.w, 1))),
    "spectral norm": of_image(lambda s, h: h / torch.linalg.matrix_norm(s.w, 2)),
    "solve": of_image(lambda s, h: torch.linalg.solve(s.square @ s.square.T + torch.eye(8).to(h.dtype), h.T).T),
    "matrix_exp": of_image(lambda s, h: h @ torch.matrix_exp(s.square)),
    "factors": of_image(lambda s, h: h @ torch.linalg.qr(s.square)[0]),
    "triangle": of_image(lambda s, h: h @ s.square.triu(1)),
    "parts": lambda s, x: x.flatten(1) @ torch.cat(s.w.split([3, 5], 0)[::-1]).T * s.c.unbind()[3],
    "padded": of_image(lambda s, h: h + functional.pad(s.c[None, :6], (1, 1), mode="reflect")),
    "in place": of_image(lambda s, h: h.add_(s.c).mul_(s.c2)),
}
FILTER_FUNCTIONS: dict[str, Forward] = {
    "group_norm": of_filters(lambda s, x: functional.group_norm(x, 2, s.w, s.c)),
    "group_norm, weight alone": of_filters(lambda s, x: functional.group_norm(x, 3, s.w, eps=0.1)),
    "group_norm, named": of_filters(lambda s, x: functional.group_norm(input=x, num_groups=2, weight=s.w, bias=s.c)),
    "group_norm of vectors": lambda s, x: functional.group_norm(
        functional.conv2d(x, s.filters)[:, :, 0, 0], 2, s.w, s.c
    ),
    "torch.group_norm": of_filters(lambda s, x: torch.group_norm(x, 2, s.w, s.c, 0.1)),
    "instance_norm": of_filters(lambda s, x: functional.instance_norm(x, weight=s.w, bias=s.c, eps=0.1)),
    "layer_norm of images": of_filters(lambda s, x: functional.layer_norm(x, (14, 14), s.image)),
    "conv_transpose2d": lambda s, x: functional.conv_transpose2d(x, s.turned, s.c, stride=2).mean((2, 3)),
    "local_response_norm": of_filters(
        lambda s, x: functional.local_response_norm(x * s.w[:, None, None], 3, alpha=0.1)
    ),
}
KINDS: dict[str, tuple[Any, dict[str, Forward], int, dict[str, tuple[int, ...]]]] = {
    "texts": (TEXTS, TEXT_FUNCTIONS, 8, {"w": (60, 8), "c": (8,), "q": (12,), "q12": (12, 8)}),
    "images": (
        IMAGES,
        IMAGE_FUNCTIONS,
        8,
        {"w": (8, 196), "c": (8,), "c2": (8,), "third": (8, 9, 11), "square": (8, 8)},
    ),
    "filters": (
        COLOURED,
        FILTER_FUNCTIONS,
        6,
        {"filters": (6, 3, 3, 3), "w": (6,), "c": (6,), "image": (14, 14), "turned": (3, 6, 3, 3)},
    ),
}


def padded(source: Source) -> None:
    """Texts of unlike lengths, with padding behind."""
    source.x = [torch.where(torch.arange(12) > 2 + torch.arange(len(one)).unsqueeze(1) % 8, 0, one) for one in source.x]


def model_of(kind: str, forward: Forward) -> tuple[FlatModel, Any]:
    description, _, wide, shapes = KINDS[kind]
    torch.manual_seed(1)
    return FlatModel(Net(forward, wide, **shapes).double()), description


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind][1]])
def test_a_function_of_parameters_has_the_gradients_that_it_has_alone(kind: str, name: str):
    model, description = model_of(kind, KINDS[kind][1][name])
    assert why_not_stackable(model.module, description) is None
    sizes = ragged_sizes(8, 20)
    source = Source(description, sizes, torch.float64)
    if kind == "texts":
        padded(source)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, RULE)
    found, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, RULE)
    assert relative_difference(expected, model.initial) > 1e-4, "training must have changed the model"
    assert relative_difference(found, expected) < 1e-12


class Clipped(torch.autograd.Function):
    """As it is; its gradient is cut where it is large, which small ones do not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e6, 1e6)


REFUSED: dict[str, tuple[str, Forward, str]] = {
    "frequencies": ("texts", of_text(lambda s, x: functional.embedding(x, s.w, scale_grad_by_freq=True)), "freq"),
    "frequencies, torch": ("texts", of_text(lambda s, x: torch.embedding(s.w, x, -1, True)), "freq"),
    "norms kept": ("texts", of_text(lambda s, x: functional.embedding(x, s.w, max_norm=9.0)), "max_norm"),
    "norms kept by place": ("texts", of_text(lambda s, x: functional.embedding(x, s.w, 0, 9.0)), "max_norm"),
    "norms of bags": ("texts", lambda s, x: functional.embedding_bag(x.long(), s.w, max_norm=9.0), "max_norm"),
    "frequencies of bags": (
        "texts",
        lambda s, x: functional.embedding_bag(x.long(), s.w, mode="sum", scale_grad_by_freq=True),
        "freq",
    ),
    "batches": ("images", of_image(lambda s, h: functional.batch_norm(h, None, None, s.c, None, True)), "see one"),
    "a gradient of one's own": ("images", of_image(lambda s, h: Clipped.apply(h)), "Clipped has a backward pass"),
    "a pair of unlike parts": (
        "images",
        of_image(lambda s, h: torch.atleast_1d(s.c, h)[1] * torch.atleast_1d(s.c, h)[0]),
        "samples beside others",
    ),
    "data": ("images", of_image(lambda s, h: h * s.c.data), "change what parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_lost_side_by_side_is_refused_whatever_the_values(name: str):
    kind, forward, words = REFUSED[name]
    model, description = model_of(kind, forward)
    assert words in str(why_not_stackable(model.module, description))


@pytest.mark.parametrize("options", [{"max_norm": 9.0}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_layers_of_words_that_change_their_table_are_refused(kind: type[nn.Module], options: dict[str, Any]):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            more = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
            self.words, self.last = kind(60, 8, **more, **options), nn.Linear(8, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.last(self.words(tokens.long()).flatten(1)[:, :8])

    assert "max_norm" in str(why_not_stackable(Words(), TEXTS))


def test_groups_may_be_moved_without_being_scaled():
    x, bias = torch.randn(3, 4, 6, 5), torch.randn(3, 6)
    found = forms.normed_groups(x, 2, bias=bias)
    alone = [functional.group_norm(one, 2, bias=own) for one, own in zip(x, bias, strict=True)]
    torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [0, 1, 2, 3, -1])
def test_a_form_that_forgets_the_padding_is_found_out(padding: int, dtype: torch.dtype, monkeypatch):
    """Made-up texts hold padding: the form is tried on what real ones have."""
    look = forms.FUNCTIONS[functional.embedding]
    monkeypatch.setitem(forms.FUNCTIONS, functional.embedding, lambda x, w, **more: look(x, w))
    many = Net(of_text(lambda s, x: functional.embedding(x, s.w, padding)), 8, w=(3000, 8)).to(dtype)
    assert "other gradients" in str(why_not_stackable(many, replace(TEXTS, vocabulary=3000)))


@pytest.mark.parametrize("rows", ROWS)
def test_made_up_texts_begin_with_a_word_and_end_in_padding(rows: int):
    tokens = made_up(nn.Linear(1, 1), TEXTS, rows).numpy()
    assert tokens.shape == (rows, 12) and (tokens[:, 0] > 0).all()
    assert (tokens >= 0).all() and (tokens < 60).all()
    lengths = [int(np.flatnonzero(one).max()) + 1 for one in tokens]
    assert lengths[0] > 9 and all(length <= 12 // (row + 1) for row, length in enumerate(lengths))
    assert len(np.unique(tokens[0])) < 12, "words come several times"
    assert not made_up(nn.Linear(1, 1), replace(TEXTS, vocabulary=1), rows).any()


@pytest.mark.parametrize("function", [functional.group_norm, torch.group_norm])
def test_groups_of_images_that_lie_pixel_by_pixel_are_normed(function: Callable[..., Tensor]):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(function(self.filters(x), 2, self.norm.weight, self.norm.bias).relu().mean((2, 3)))

    torch.manual_seed(1)
    model, sizes = FlatModel(Normed()), ragged_sizes(8, 20)
    source = Source(COLOURED, sizes)
    expected, _ = train(SequentialEngine(model, source, STREAMS), tasks_for(sizes), model.initial, RULE)
    found, _ = train(BatchedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, RULE)
    assert relative_difference(found, expected) < 1e-5


def test_following_a_forward_pass_leaves_torch_as_it_was():
    before = torch.autograd.Function.__dict__["apply"]
    model, description = model_of("images", IMAGE_FUNCTIONS["no gradient"])
    assert why_not_stackable(model.module, description) is None
    assert torch.autograd.Function.__dict__["apply"] is before and torch.is_grad_enabled()


def test_a_pair_is_free_of_samples_where_both_parts_are():
    assert without_samples(None) and without_samples((None, (None, None)))
    assert not without_samples((Along(0, 1), None)) and not without_samples(Along(0, 1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_tried_as_often_as_one_likes(kind: type[nn.Module]):
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.states, self.last = nn.Embedding(60, 8), kind(8, 6, batch_first=True), nn.Linear(6, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.last(self.states(self.words(tokens))[0][:, -1])

    model = FlatModel(States())
    assert [why_not_stackable(model.module, TEXTS) for _ in range(3)] == [None] * 3
    model.bind(model.initial.clone())
    assert why_not_stackable(model.module, TEXTS) is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_recurrent_layer_that_keeps_its_state_is_refused_every_time(begun: bool):
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.states = nn.Embedding(60, 8), nn.LSTM(8, 5, batch_first=True)
            if begun:
                self.states.kept = None

        def forward(self, tokens: Tensor) -> Tensor:
            states, before = self.states(self.words(tokens))[0][:, -1], getattr(self.states, "kept", None)
            self.states.kept = states.detach()
            return states if before is None else states + before.mean(0)

    module = Kept()
    assert all("kept from the call before is read" in str(why_not_stackable(module, TEXTS)) for _ in range(2))
    assert getattr(module.states, "kept", None) is None
