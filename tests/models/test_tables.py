"""Word vectors of clients side by side: what leaves them for the round's sum."""

import pytest
import torch
from fedmpi.models.stacked.text import BLOCK, Tables

from fedmpi.common.streams import Streams
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.work import LocalRule
from tests.local.stacks import TEXTS, Source, flat_model, ragged_sizes, tasks_for, train

WORDS, DIMENSION = 2 * BLOCK + 77, 3


def tables_of_three() -> tuple[Tables, torch.Tensor]:
    """A client with all words, one with few and one with three, their vectors changed."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.arange(WORDS), torch.tensor([5, 5, 9]), torch.tensor([2, WORDS - 1, 9])]
    tables = Tables(texts, torch.randn(WORDS, DIMENSION, generator=generator))
    tables.values.add_(torch.randn(tables.values.shape, generator=generator))
    return tables, torch.randn(WORDS, DIMENSION, generator=generator)


def test_the_changes_of_all_clients_words_are_added_with_their_coefficients():
    tables, total = tables_of_three()
    coefficients = torch.tensor([0.5, 2.0, -1.5])
    repeats = torch.tensor(tables.bounds).diff()
    changes = (tables.values - tables.start) * coefficients.repeat_interleave(repeats).unsqueeze(1)
    expected = total.clone().index_add_(0, tables.rows, changes)
    length = tables.add_changes(coefficients, total)
    assert torch.equal(total, expected)
    assert torch.allclose(length, changes.square().sum())


def test_a_change_that_is_not_finite_shows_in_the_length():
    tables, total = tables_of_three()
    tables.values[-1, 1] = torch.inf
    assert not tables.add_changes(torch.ones(3), total).isfinite()


def test_changes_are_made_some_words_at_a_time():
    tables, total = tables_of_three()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        tables.add_changes(torch.ones(3), total)
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * BLOCK * DIMENSION


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_plain_sgd_makes_no_gradients_of_tables(monkeypatch: pytest.MonkeyPatch, optimizer: str):
    """They would be as large as the tables: zeros that nobody reads."""
    sizes, asked = ragged_sizes(3, 9), []
    model = flat_model("text-cnn", TEXTS, torch.float32)
    engine = BatchedEngine(model, Source(TEXTS, sizes, torch.float32), Streams(1))
    gradient = Tables.gradient.fget
    monkeypatch.setattr(Tables, "gradient", property(lambda tables: asked.append(True) or gradient(tables)))
    train(engine, tasks_for(sizes), model.initial, LocalRule(lr=0.05, epochs=1, batch_size=4, optimizer=optimizer))
    assert bool(asked) == (optimizer == "adam")
