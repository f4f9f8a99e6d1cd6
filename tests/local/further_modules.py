"""Models with the layers that are met less often: plain recurrent ones, and others with options of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.local.stacks import CLASSES, COLOURED, TEXTS


class Recurrent(nn.Module):
    """Two layers in two directions, samples first: the states of every word and the last ones are read."""

    def __init__(self, nonlinearity: str):
        super().__init__()
        self.embedding = nn.Embedding(60, 8, padding_idx=0)
        self.rnn = nn.RNN(8, 7, 2, nonlinearity=nonlinearity, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(14, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, last = self.rnn(self.embedding(tokens))
        return self.fc(states.square().mean(1) + torch.cat([last[-2], last[-1] - last[0]], dim=1))


class BegunBothWays(nn.Module):
    """Layers in both directions, each begun with states of its own; one bias stays as it is."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(12, CLASSES)
        self.gru = nn.GRU(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(12, 6, bidirectional=True, batch_first=True)
        self.gru.bias_ih_l0.requires_grad_(False)
        self.gru.bias_hh_l1.requires_grad_(False)
        self.states = nn.Parameter(torch.randn(8, 1, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.states.expand(-1, tokens.shape[0], -1).contiguous()
        states, last = self.gru(self.words(tokens), first[:4])
        states, (h, c) = self.lstm(states, (first[4:6], first[6:]))
        return self.fc(states.sum(1) + torch.cat([h[0] * c[1], last[1] + last[2]], 1))


class Changed(nn.Module):
    """States that are changed in place, and are not those that the layers go back through."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(7, CLASSES)
        self.gru, self.lstm = nn.GRU(8, 6, batch_first=True), nn.LSTM(6, 7, batch_first=True)
        self.rnn = nn.RNN(7, 7, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.gru(self.words(tokens))[0].mul_(2)
        states = self.rnn(self.lstm(states)[0])[0].add_(1)
        return self.fc(states.sum(1))


class Begun(nn.Module):
    """Time first, without biases, first states learned or computed, called twice; a second layer is partly frozen."""

    def __init__(self, nonlinearity: str):
        super().__init__()
        self.embedding, self.first = nn.Embedding(60, 8), nn.Parameter(torch.randn(2, 1, 6))
        self.rnn = nn.RNN(8, 6, 2, nonlinearity=nonlinearity, bias=False)
        self.other, self.fc = nn.RNN(6, 5, nonlinearity=nonlinearity), nn.Linear(11, CLASSES)
        self.other.weight_hh_l0.requires_grad_(False)
        self.other.bias_ih_l0.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens).transpose(0, 1)
        states, last = self.rnn(words, self.first.expand(-1, tokens.shape[0], -1).contiguous())
        states, last = self.rnn(words.flip(0) + states.mean((0, 2), keepdim=True), hx=last.tanh())
        return self.fc(torch.cat([self.other(states)[1][0], last.sum(0)], 1))


class Projected(nn.Module):
    """States of fewer values than the cells, in both directions; last states and cells are read."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True, proj_size=4)
        self.fc = nn.Linear(8 + 4 + 6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, (h, c) = self.lstm(self.embedding(tokens))
        return self.fc(torch.cat([states.square().mean(1), h[-2] - h[1], c[-1] + c[0]], 1))


class BegunProjected(nn.Module):
    """Time first, without biases, first states given, called twice; a second one whose projection is frozen."""

    def __init__(self):
        super().__init__()
        self.embedding, self.first = nn.Embedding(60, 8), nn.Parameter(torch.randn(1, 1, 4))
        self.lstm, self.other = nn.LSTM(8, 6, bias=False, proj_size=4), nn.LSTM(4, 5, proj_size=2)
        self.other.weight_hr_l0.requires_grad_(False)
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens).transpose(0, 1)
        first = self.first.expand(-1, tokens.shape[0], -1).contiguous()
        states, (h, c) = self.lstm(words, (first, torch.ones(1, tokens.shape[0], 6, dtype=words.dtype)))
        states, (h, c) = self.lstm(words.flip(0), (h.tanh(), c))
        return self.fc(torch.cat([self.other(states)[0].sum(0), h[0] * h[0].relu() + first[0], h[0]], 1))


class Handed(nn.Module):
    """States of LSTMs, which are tuples, handed on whole: to another layer, step after step, to a cell and by name."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.Embedding(60, 8), nn.Linear(18, CLASSES)
        self.encoder = nn.LSTM(8, 6, 2, batch_first=True)
        self.decoder = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.3)
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        found = self.encoder(words)
        states, state = self.decoder(words[:, :1], found[1])
        for place in range(1, 4):
            states, state = self.decoder(words[:, place : place + 1], hx=state)
        kept = None
        for one in found[0].unbind(1)[:5]:
            kept = self.cell(one, kept)
        last = tuple(value.tanh() for value in state)
        return self.fc(torch.cat([states[:, -1], self.decoder(words, last)[0].mean(1), kept[0] * kept[1]], 1))


class Mirrored(nn.Module):
    """Images with values of their own around them: sides of unlike sizes, strides, dilation, groups, single pixels."""

    def __init__(self, mode: str):
        super().__init__()
        self.wide = nn.Conv2d(3, 4, 5, stride=(2, 1), padding=(2, 3), padding_mode=mode)
        self.even = nn.Conv2d(4, 6, (2, 4), padding="same", dilation=(3, 1), padding_mode=mode)
        self.grouped = nn.Conv2d(6, 6, (3, 2), padding=(0, 2), groups=3, bias=False, padding_mode=mode)
        self.single = nn.Conv2d(6, 4, 1, stride=(2, 3), padding=(1, 2), padding_mode=mode)
        self.none = nn.Conv2d(4, 4, 2, padding="valid", padding_mode=mode)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.even(functional.relu(self.wide(x))))
        x = self.none(functional.relu(self.single(functional.relu(self.grouped(x)))))
        return self.fc(functional.adaptive_avg_pool2d(x, 2).flatten(1))


class MirroredTexts(nn.Module):
    """The same of texts; what is read of the last one is its maximum alone."""

    def __init__(self, mode: str):
        super().__init__()
        self.embedding = nn.Embedding(60, 8)
        self.wide = nn.Conv1d(8, 4, 3, stride=2, padding=4, padding_mode=mode)
        self.even = nn.Conv1d(4, 6, 4, padding="same", dilation=1, bias=False, padding_mode=mode)
        self.grouped = nn.Conv1d(6, 6, 2, padding="same", dilation=3, groups=2, padding_mode=mode)
        self.last, self.fc = nn.Conv1d(6, 8, 3, padding="same", padding_mode=mode), nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.grouped(torch.tanh(self.even(functional.relu(self.wide(self.embedding(tokens).transpose(1, 2))))))
        return self.fc(self.last(x).max(2)[0])


class Transposed(nn.Module):
    """Transposed convolutions of images and of texts, with PReLU of one slope and of one a channel."""

    def __init__(self):
        super().__init__()
        self.down, self.slope, self.slopes = nn.Conv2d(3, 4, 3, stride=4), nn.PReLU(), nn.PReLU(6)
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=(2, 1), padding=(1, 0), output_padding=(1, 0))
        self.grouped = nn.ConvTranspose2d(6, 4, (2, 3), groups=2, dilation=(1, 2), bias=False)
        self.rows = nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1)
        self.columns, self.fc = nn.ConvTranspose1d(6, 4, 2, groups=2, dilation=3, bias=False), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.slopes(self.up(self.slope(self.down(x)))))
        return self.fc(self.columns(self.slopes(self.rows(x.mean(2)))).square().mean(2))


class Volumes(nn.Module):
    """Colours as the first of three axes that filters move along."""

    def __init__(self, mode: str):
        super().__init__()
        self.wide = nn.Conv3d(1, 4, 3, stride=(1, 2, 3), padding=(1, 0, 2), padding_mode=mode)
        self.even = nn.Conv3d(4, 6, 2, padding="same", groups=2, bias=False, padding_mode=mode)
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=(1, 2, 1), dilation=(1, 1, 2), padding=1)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.even(functional.relu(self.wide(x.unsqueeze(1))))
        return self.fc(functional.relu(self.up(x)).mean((2, 3, 4)))


class Bilinear(nn.Module):
    """Every word with the one before it and with the first one, by products of their values."""

    def __init__(self):
        super().__init__()
        self.embedding, self.pairs = nn.Embedding(60, 8), nn.Bilinear(8, 8, 6)
        self.ends, self.fc = nn.Bilinear(6, 8, 4, bias=False), nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.fc(self.ends(torch.tanh(self.pairs(x[:, 1:], x[:, :-1])).sum(1), x[:, 0]))


FURTHER: dict[str, tuple[object, Callable[[], nn.Module]]] = {
    "rnn": (TEXTS, lambda: Recurrent("tanh")),
    "rnn-relu": (TEXTS, lambda: Recurrent("relu")),
    "begun-both-ways": (TEXTS, BegunBothWays),
    "changed-states": (TEXTS, Changed),
    "begun-rnn": (TEXTS, lambda: Begun("tanh")),
    "begun-rnn-relu": (TEXTS, lambda: Begun("relu")),
    "projected": (TEXTS, Projected),
    "begun-projected": (TEXTS, BegunProjected),
    "handed-on": (TEXTS, Handed),
    "reflected": (COLOURED, lambda: Mirrored("reflect")),
    "replicated": (COLOURED, lambda: Mirrored("replicate")),
    "circular": (COLOURED, lambda: Mirrored("circular")),
    "reflected-texts": (TEXTS, lambda: MirroredTexts("reflect")),
    "replicated-texts": (TEXTS, lambda: MirroredTexts("replicate")),
    "circular-texts": (TEXTS, lambda: MirroredTexts("circular")),
    "transposed": (COLOURED, Transposed),
    "volumes": (COLOURED, lambda: Volumes("zeros")),
    "replicated-volumes": (COLOURED, lambda: Volumes("replicate")),
    "bilinear": (TEXTS, Bilinear),
}
