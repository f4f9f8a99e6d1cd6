"""Dropout in functions where it is easily got wrong: what a model of a user may do with its values besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedmpi.common.streams import Streams
from fedmpi.core.experiment import agree_on_traits
from fedmpi.local.batched.engine import BatchedEngine, why_not_side_by_side
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import adopt_traits, forward_traits
from fedmpi.local.work import LocalRule
from fedmpi.models.dropout import ClientMasks, Masks, NoMasks
from fedmpi.models.dropout_calls import DropoutCalls
from fedmpi.models.flat import FlatModel
from tests.local.stacks import CLASSES, IMAGES, TEXTS, Source, ragged_sizes, relative_difference, tasks_for, train

STREAMS = Streams(7)
EPOCHS, ONE = LocalRule(lr=0.05, epochs=2, batch_size=7), LocalRule(lr=0.05, epochs=1, batch_size=None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b, self.fc = (
            nn.Embedding(60, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, CLASSES),
        )

    def drop(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(self.a(x)), 0.3, self.training)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.within(self.words(tokens), tokens).mean(1))

    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.drop(x)


class Empty(Source):
    """Every third text is nothing but padding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for x in self.x:
            x[::3] = 0


class Ragged(Source):
    def __post_init__(self) -> None:
        super().__post_init__()
        generator = np.random.default_rng(1)
        for x in self.x:
            for row in x:
                row[generator.integers(1, 12) :] = 0


def set_up(net: Callable[[], nn.Module], kind: type[Source] = Source):
    torch.manual_seed(1)
    model, sizes = FlatModel(net().double()), ragged_sizes(10, 20)
    return model, kind(TEXTS, sizes, torch.float64), tasks_for(sizes)


def test_heads_with_nothing_to_attend_to_give_zeros_and_no_nan():
    """need_weights=False, as nn.TransformerEncoderLayer calls: torch's sdpa gives zeros for such a row."""
    layer = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[0] = True
    expected = layer.eval()(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    masks = Masks()
    masks.source = NoMasks()
    with DropoutCalls(masks):
        found = layer.train()(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(found, expected)


class Encoder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=tokens == 0)


def test_an_encoder_reads_empty_texts():
    model, source, tasks = set_up(Encoder, Empty)
    assert torch.isfinite(train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)[0]).all()


class Checkpointed(Net):
    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        return checkpoint(lambda y: self.b(self.drop(y)), x, use_reentrant=False)


class Plain(Net):
    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.b(self.drop(x))


class WithLayer(Net):
    """A layer for the dropout, computed again or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.layer = again, nn.Dropout(0.3)

    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        parts = nn.Sequential(self.a, nn.Tanh(), self.layer, self.b)
        return checkpoint(parts, x, use_reentrant=False) if self.again else parts(x)


@pytest.mark.parametrize(
    ("again", "once"),
    [(Checkpointed, Plain), (lambda: WithLayer(True), lambda: WithLayer(False))],
    ids=["call", "layer"],
)
def test_passes_computed_again_drop_the_same(again: Callable[[], nn.Module], once: Callable[[], nn.Module]):
    """The masks are torch's, seeded for each client: those of the same model that keeps what it has computed."""
    results = []
    for net, seed in ((once, 1), (again, 1), (again, 2)):
        model, source, tasks = set_up(net)
        traits = forward_traits(model, TEXTS)
        assert traits.torch_drops == traits.draws == (net is again)
        adopt_traits(model, replace(traits, torch_drops=True, draws=True))
        torch.manual_seed(seed)
        results.append(train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)[0] - model.initial)
    assert relative_difference(results[2], results[1]) < 1e-12
    assert relative_difference(results[1], results[0]) < 1e-12


def test_a_layer_computed_again_is_switched_off_as_well_and_a_call_refused():
    results, off = [], replace(EPOCHS, dropout=False)
    for again in (True, False):
        model, source, tasks = set_up(lambda again=again: WithLayer(again))
        results.append(train(SequentialEngine(model, source, STREAMS), tasks, model.initial, off)[0] - model.initial)
    assert relative_difference(*results) < 1e-12
    model, source, tasks = set_up(Checkpointed)
    with pytest.raises(Exception, match="wanted without dropout"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, off)


class Sorted(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        order = (tokens != 0).sum(1).argsort(descending=True, stable=True)
        return self.fc(self.drop(self.words(tokens[order])).mean(1))[order.argsort()]


class NonEmpty(Net):
    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        kept = (tokens != 0).any(1).nonzero()[:, 0]
        return torch.zeros_like(x).index_put((kept,), self.drop(x[kept]))


class InParts(Net):
    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([self.drop(part) for part in x.split(16)])


@pytest.mark.parametrize(
    ("net", "kind"), [(Sorted, Ragged), (NonEmpty, Empty), (InParts, Source)], ids=["sorted", "empty", "parts"]
)
def test_merged_clients_get_their_own_masks_or_are_refused(net: type[nn.Module], kind: type[Source]):
    model, source, tasks = set_up(net, kind)
    merged = MergedEngine(model, source, STREAMS)
    if merged.model_refusal() is None:
        expected = train(SequentialEngine(model, source, STREAMS), tasks, model.initial, ONE)[0] - model.initial
        found = train(merged, tasks, model.initial, ONE)[0] - model.initial
        assert relative_difference(found, expected) < 1e-12


def test_a_probability_may_be_a_tensor():
    class Chance(Net):
        def drop(self, x: Tensor) -> Tensor:
            return functional.dropout(self.a(x), torch.tensor(0.3), self.training)

    model, source, tasks = set_up(Chance)
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)


@pytest.mark.slow
def test_a_compiled_module_still_trains():
    model, source, tasks = set_up(lambda: torch.compile(Net(), backend="eager"))
    assert forward_traits(model, TEXTS).torch_drops
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)


def test_nested_tensors_may_be_dropped_from():
    class Nested(Net):
        def drop(self, x: Tensor) -> Tensor:
            rows = torch.nested.as_nested_tensor(self.a(x))
            return torch.nested.to_padded_tensor(functional.dropout(rows, 0.3, self.training), 0.0)

    model, source, tasks = set_up(Nested)
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)


def test_masks_under_vmap_differ_where_randomness_should():
    masks = Masks()
    masks.source = ClientMasks(lambda: np.random.Generator(np.random.Philox(5)))
    with DropoutCalls(masks):
        found = torch.func.vmap(lambda y: functional.dropout(y, 0.5), randomness="different")(torch.ones(6, 40))
    assert not torch.equal(found[0], found[1])


def test_everything_dropped_in_a_chain_goes_side_by_side_as_before():
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(196, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(functional.dropout(self.a(x.flatten(1)), 1.0, self.training))

    assert why_not_side_by_side(FlatModel(All()), IMAGES) is None


@pytest.mark.parametrize(
    "named", [{"is_causal": True, "attn_mask": torch.zeros(4, 4)}, {"attn_mask": torch.ones(4, 4).long()}]
)
def test_what_torchs_attention_refuses_is_refused(named):
    q, masks = torch.randn(3, 4, 6), Masks()
    masks.source = NoMasks()
    with pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(q, q, q, **named)
    with DropoutCalls(masks), pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3, **named)


def test_numbers_of_single_precision_may_mask_queries_of_half_precision():
    """torch adds them; the query keeps its type."""
    q, masks = torch.randn(2, 5, 6).bfloat16(), Masks()
    masks.source = NoMasks()
    named = {"attn_mask": torch.zeros(5, 5)}
    expected = functional.scaled_dot_product_attention(q, q, q, **named)
    with DropoutCalls(masks):
        found = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3, **named)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_values_with_a_first_axis_as_long_as_a_trials_batches_are_known_to_lie_across(rows: int):
    class Heads(Net):
        def drop(self, x: Tensor) -> Tensor:
            heads = self.a(x).unflatten(2, (rows, -1)).permute(2, 0, 1, 3)
            return functional.dropout(heads, 0.3, self.training).permute(1, 2, 0, 3).flatten(2)

    model, source, _ = set_up(Heads)
    assert "first axis is not the samples" in str(MergedEngine(model, source, STREAMS).model_refusal())


class Frozen(Net):
    """Frozen layers that drop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, 2, dropout=0.4, bidirectional=True, batch_first=True).requires_grad_(False)
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).requires_grad_(False)

    def within(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.lstm(self.a(x))[0]
        return self.heads(x, x, x, need_weights=False)[0]


def test_frozen_layers_drop_side_by_side():
    model, source, tasks = set_up(Frozen)
    assert why_not_side_by_side(model, TEXTS) is None
    expected, found = (
        train(engine(model, source, STREAMS), tasks, model.initial, EPOCHS)[0] - model.initial
        for engine in (SequentialEngine, BatchedEngine)
    )
    assert relative_difference(found, expected) < 1e-12


def test_a_loss_of_an_algorithms_own_drops_the_clients_values_too():
    model, source, _ = set_up(Plain)
    assert forward_traits(model, TEXTS).calls_dropout
    x, y = source.load(0)
    model.bind(model.initial.clone())
    model.module.train()
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model.masks.source = ClientMasks(lambda: np.random.Generator(np.random.Philox(5)))
        losses.append(model.own_gradient(lambda module, x, y: functional.cross_entropy(module(x), y), x, y)[0])
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "trait", ["draws", "couples", "calls_dropout", "drops_across", "torch_drops", "drops", "writes", "bends"]
)
def test_what_another_rank_found_out_counts(trait: str):
    model, _, _ = set_up(lambda: nn.Sequential(nn.Embedding(60, 8), nn.Flatten(), nn.Linear(96, CLASSES)))
    own = forward_traits(model, TEXTS)
    traits = ["draws", "couples", "loss.draws", "loss.couples", "bytes_kept", "bytes_widest", "least"]
    traits += ["calls_dropout", "drops_across", "torch_drops", "drops", "writes", "bends"]
    maxima = iter(traits)
    cluster = SimpleNamespace(maximum=lambda value: 1 if next(maxima) == trait else value)
    agree_on_traits(cluster, model, TEXTS)  # type: ignore[arg-type]
    assert forward_traits(model, TEXTS) == replace(own, **{trait: True})
    assert (model.calls_dropout, model.masks.from_torch) == (trait == "calls_dropout", trait == "torch_drops")


def test_a_model_that_drops_nothing_may_be_compiled_or_computed_again():
    class Undropped(Checkpointed):
        def drop(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x))

    for net in (
        Undropped,
        lambda: torch.compile(nn.Sequential(nn.Embedding(60, 8), nn.Flatten(), nn.Linear(96, 5)), backend="eager"),
    ):
        traits = forward_traits(set_up(net)[0], TEXTS)
        assert not traits.torch_drops and not traits.draws


def test_ranks_that_have_found_the_same_keep_it():
    for net in (Plain, Checkpointed):
        model, _, _ = set_up(net)
        own = forward_traits(model, TEXTS)
        agree_on_traits(SimpleNamespace(maximum=lambda value: value), model, TEXTS)  # type: ignore[arg-type]
        assert forward_traits(model, TEXTS) == own
