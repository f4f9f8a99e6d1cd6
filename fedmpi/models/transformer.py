"""FedSampling's attention model (Qi et al., authors' model 'Trans'): one self-attention layer and the common head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.registry import register
from fedmpi.models.text_layers import pooled_classifier

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


class SelfAttention(nn.Module):
    """Scaled dot-product attention of every word to every word, several heads, as the authors publish it.

    Query, key and value projections without bias and nothing else: no output projection, residual, normalisation,
    position or mask, so padding is attended too.
    """

    def __init__(self, dimension: int, heads: int, head_size: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dimension, heads * head_size, bias=False)
        self.key = nn.Linear(dimension, heads * head_size, bias=False)
        self.value = nn.Linear(dimension, heads * head_size, bias=False)
        for projection in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(projection.weight)

    def _split(self, projected: Tensor) -> Tensor:
        count, length, width = projected.shape
        return projected.view(count, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, words: Tensor) -> Tensor:
        """From (n, L, E) to (n, L, heads · head_size)."""
        query, key, value = (self._split(project(words)) for project in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).flatten(2)


@register("model", "transformer")
def transformer(
    description: DataDescription,
    *,
    dimension: int = 300,
    heads: int = 20,
    head_size: int = 20,
    dropout: float = 0.2,
    hidden: Sequence[int] = (256, 256),
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """FedSampling's 'Transformer' (§4.1): self-attention, dropout, attentive pooling, dense layers.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
    dimension : int
        Size of a word vector.
    heads : int
        Heads of the attention.
    head_size : int
        Values of a head.
    dropout : float
        After the attention and again inside the pooling.
    hidden : sequence of int
        Units of the dense ReLU layers.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Whether the word vectors stay as they are.

    Raises
    ------
    UserError
        The data are no texts.
    """

    def attention(size: int) -> tuple[str, nn.Module, int]:
        return "attention", SelfAttention(size, heads, head_size), heads * head_size

    return pooled_classifier(
        description,
        "transformer",
        attention,
        dimension=dimension,
        dropout=dropout,
        hidden=hidden,
        vectors=vectors,
        frozen=frozen,
    )
