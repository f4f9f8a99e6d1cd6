"""Models that drop values without a layer for it: in functions, in attention, between recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.local.stacks import CLASSES, COLOURED, IMAGES, TEXTS


class LeNetWithCalls(nn.Module):
    """Dropout as in many tutorials; a chain of layers but for that."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 20), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.dropout(functional.max_pool2d(functional.relu(self.conv2(x)), 2), 0.25, training=self.training)
        x = torch.dropout(functional.relu(self.fc1(x.flatten(1))), 0.5, self.training)
        return functional.dropout(self.fc2(x), 0.0, self.training)


class Calls(nn.Module):
    """Whole channels, in place, twice of one value, of joined samples, beside layers, and one that nothing reads."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(3, 6, 5, 3), nn.Linear(6 * 16, 12), nn.Linear(12, CLASSES)
        self.layer = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout2d(torch.tanh(self.conv(x)), 0.3, self.training)
        functional.dropout(x, 0.5, self.training)
        rows = functional.dropout(x.flatten(0, 1).flatten(1), p=0.2, training=self.training)
        x = torch.feature_dropout(rows.view(-1, 6, 16), 0.25, self.training).flatten(1)
        x = self.fc1(self.layer(x))
        x = functional.dropout(x, 0.3, self.training) + functional.dropout(x, 0.3, self.training)
        return self.fc2(functional.dropout(x * 2, 0.4, self.training, inplace=True))


class OwnAttention(nn.Module):
    """Scaled dot products with dropout: plain, causal, masked by booleans and by numbers, queries in groups."""

    def __init__(self):
        super().__init__()
        self.words, self.q = nn.Embedding(60, 8), nn.Linear(8, 8)
        self.kv, self.fc = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        p = 0.2 if self.training else 0.0
        attend = functional.scaled_dot_product_attention
        x = x + attend(self.q(x), x, x, dropout_p=p)
        x = x + attend(x, x, self.q(x), None, p, True, scale=0.3)
        near = torch.ones(12, 12, dtype=torch.bool, device=tokens.device).tril(2).triu(-2)
        x = x + attend(x, x, x, near, p)
        x = x + attend(x, x, x, near.to(x.dtype), p)
        heads = self.q(x).unflatten(2, (4, 2)).transpose(1, 2)
        keys, values = self.kv(x).unflatten(2, (2, 2, 2)).permute(2, 0, 3, 1, 4)
        x = x + attend(heads, keys, values, dropout_p=p, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.fc(x.mean(1))


class EncoderWithDropout(nn.Module):
    """torch's own transformer layer with the dropout that it has by default."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8, padding_idx=0), nn.Linear(8, CLASSES)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.fc(self.layer(x).mean(1))


class SeveralHeads(nn.Module):
    """Shares of attention, dropped and read; words before samples; masks of places."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(8, CLASSES)
        self.first = nn.MultiheadAttention(8, 2, dropout=0.3)
        self.second = nn.MultiheadAttention(8, 4, dropout=0.2, bias=False, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(0, 1)
        later = torch.ones(12, 12, dtype=torch.bool, device=tokens.device).triu(1)
        x, shares = self.first(x, x, x, attn_mask=later)
        x = x.transpose(0, 1)
        found, each = self.second(x[:, :1], x, x, average_attn_weights=False)
        squares = shares.square().sum((1, 2)) + each.square().sum((1, 2, 3))
        return self.fc(found[:, 0] + squares.unsqueeze(1))


class DeepLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=3, dropout=0.4, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, (last, cells) = self.lstm(self.words(tokens))
        return self.fc(states.mean(1) + torch.cat([last[-1], cells[0]], 1))


class DeepGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.gru = nn.Embedding(60, 8), nn.GRU(8, 6, num_layers=2, dropout=0.4, bias=False)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(0, 1)
        states, last = self.gru(x, hx=x.new_ones(2, x.shape[1], 6))
        return self.fc(states[-1] + last[0])


class DeepRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 8)
        self.rnn = nn.RNN(8, 6, num_layers=2, dropout=0.4, bidirectional=True, nonlinearity="relu", batch_first=True)
        self.cell, self.fc = nn.LSTMCell(12, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.rnn(self.words(tokens))
        zeros = states.new_zeros(tokens.shape[0], 5)
        return self.fc(self.cell(states.mean(1), hx=(zeros, zeros + 1))[0])


DROPPING: dict[str, tuple[object, Callable[[], nn.Module]]] = {
    "lenet-with-calls": (IMAGES, LeNetWithCalls),
    "calls": (COLOURED, Calls),
    "own-attention": (TEXTS, OwnAttention),
    "encoder-with-dropout": (TEXTS, EncoderWithDropout),
    "several-heads": (TEXTS, SeveralHeads),
    "deep-lstm": (TEXTS, DeepLSTM),
    "deep-gru": (TEXTS, DeepGRU),
    "deep-rnn": (TEXTS, DeepRNN),
}
