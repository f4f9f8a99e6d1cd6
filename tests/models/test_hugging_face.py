"""A small, randomly initialized model of Hugging Face's transformers is a model like any other, with LoRA too."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import fedmpi
from tests.tasks import worlds
from tests.tasks.worlds import BASE

transformers = pytest.importorskip("transformers")


class Logits(nn.Module):
    """A language model whose outputs are its logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens.long()).logits


def small_llama(description: Any) -> nn.Module:
    """Two layers of width 16."""
    config = transformers.LlamaConfig(
        vocab_size=description.vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=description.feature_shape[0],
    )
    return Logits(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "targets": ["q_proj", "v_proj"]}])
def test_it_learns_tokens(lora: dict[str, Any] | None):
    settings = {**BASE, "task.kind": "tokens", "local.lr": 0.3, "evaluation.every": 1}
    done = fedmpi.run(
        "fedavg", settings | ({"model.lora": lora} if lora else {}), data=worlds.tokens(), model=small_llama
    )
    first, last = done.records[0], done.records[-1]
    assert last["test_loss"] < first["test_loss"]
    assert first["bytes_client_up"] == 4 * done.summary["parameters"] * worlds.CLIENTS
    if lora:
        assert done.summary["parameters"] == 2 * 2 * 2 * (16 + 16)
