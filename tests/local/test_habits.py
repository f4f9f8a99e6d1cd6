"""Habits of those who write forward passes: followed where every pass does the same, else left to the sequential engine
for a stated reason. Nothing of what following does stays in the module.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
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
from fedmpi.models.stacked import values
from fedmpi.models.stacked.net import why_not_stackable
from tests.local.stacks import CLASSES, IMAGES, TEXTS, Source, ragged_sizes, relative_difference, tasks_for, train

STREAMS = Streams(7)
SIZES = ragged_sizes(6, 20)
RULE = LocalRule(lr=0.1, epochs=2, batch_size=7)


class Images(nn.Module):
    """Two dense layers, a parameter beside them, and a forward pass that is given what the first layer makes."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **held: Any):
        super().__init__()
        self.fc1, self.fc2, self.token = nn.Linear(196, 12), nn.Linear(12, CLASSES), nn.Parameter(torch.randn(12))
        self.register_buffer("limit", torch.tensor(0.5), persistent=False)
        self.register_buffer("travelling", torch.tensor(0.5))
        self.register_buffer("count", torch.tensor(3))
        self._forward = forward
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, self.fc1(x.flatten(1)))


class Texts(nn.Module):
    """Words before a layer that is given, a mean and a dense layer behind it."""

    def __init__(self, layer: nn.Module, apply: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        super().__init__()
        self.words, self.layer, self.fc, self.apply_layer = nn.Embedding(60, 8), layer, nn.Linear(8, CLASSES), apply

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.apply_layer(self.layer, self.words(tokens), tokens).mean(1))


def noted(self: Any, h: Tensor) -> Tensor:
    self.features, self.maps["first"] = h, (h, h.mean(1))
    self.shares = h.softmax(1)
    return self.fc2(self.shares * h)


def cached(self: Any, h: Tensor) -> Tensor:
    if self.table is None or self.length < h.shape[1]:
        self.length = h.shape[1]
        self.table = torch.linspace(0, 1, h.shape[1]).cos()
    return self.fc2(h * self.table)


def buffer_made(self: Any, h: Tensor) -> Tensor:
    if not hasattr(self, "weights"):
        self.register_buffer("weights", torch.linspace(0, 1, h.shape[1], dtype=h.dtype))
    return self.fc2(h * self.weights)


def slowly(count: Callable[[Any], float]) -> Callable[[Any, Tensor], Tensor]:
    """Each pass differs by less from the one before than single precision shows."""
    return lambda self, h: self.fc2(h * (1 + 1e-12 * count(self.calls)))


def every_other_call(self: Any, h: Tensor) -> Tensor:
    self.calls += 1
    return self.fc2(h * (1.0 if self.calls % 2 else 0.5))


def counted_tensor(self: Any, h: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return self.fc2(h / self.calls)


def counted_in_place(self: Any, h: Tensor) -> Tensor:
    self.calls += 1
    return self.fc2(h / self.calls)


def two_calls_before(self: Any, h: Tensor) -> Tensor:
    y = self.fc2(h)
    if self.earlier is not None:
        y = y + self.earlier.mean(0)
    self.earlier, self.last = self.last, y.detach()
    return y


def in_evaluation(self: Any, h: Tensor) -> Tensor:
    self.norm.eval()
    return self.fc2(self.norm(h.view(-1, 4, 3)).flatten(1))


def collected(self: Any, h: Tensor) -> Tensor:
    self.seen.append(h.detach())
    return self.fc2(h) + torch.stack([one.mean() for one in self.seen[-3:]]).mean()


def prepared_once(self: Any, h: Tensor) -> Tensor:
    if not self.ready:
        self.ready, self.shift = True, torch.linspace(0, 1, 12)
    else:
        h = h * 0.5
    return self.fc2(h + self.shift)


def assigned(self: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(h.size(0), 3, 12, dtype=h.dtype)
    rows[:, 0] = h
    rows[:, 1, ::2] = self.token[:6]
    rows[:, -1] = torch.tanh(h)
    rows[rows > 1] = 1.0
    rows[..., 3] *= 2
    return self.fc2(rows.sum(1))


def assigned_to_a_parameter(self: Any, h: Tensor) -> Tensor:
    self.token.data[0] = 0.0
    return self.fc2(h + self.token)


def clipped_one_by_one(self: Any, h: Tensor) -> Tensor:
    for parameter in self.parameters():
        parameter.data.clamp_(-9, 9)
    return self.fc2(h)


def read_from_the_state(self: Any, h: Tensor) -> Tensor:
    return self.fc2(h * self.state_dict()["travelling"])


def written_over(self: Any, h: Tensor) -> Tensor:
    bias = list(self.fc2.parameters())[1]
    torch.ones(len(bias), dtype=bias.dtype, out=bias.data)
    return self.fc2(h)


def replaced_one_by_one(self: Any, h: Tensor) -> Tensor:
    for parameter in self.parameters():
        parameter.data = parameter.data.clone()
    return self.fc2(h)


def replaced_by_new_ones(self: Any, h: Tensor) -> Tensor:
    for parameter in self.fc2.parameters():
        parameter.data = torch.full(parameter.shape, 0.1, dtype=torch.float64)
    return self.fc2(h)


def followed_by_a_mean(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        for mean in self.mean.parameters():
            mean.mul_(0.5)
    return self.fc2(h) + self.mean(h)


def slightly_by_all_weights(self: Any, h: Tensor) -> Tensor:
    return self.fc2(h) * (1 + 1e-7 * sum(parameter.abs().sum() for parameter in self.parameters()))


def slightly_without_gradient(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        size = dict(self.named_parameters())["token"].norm()
    return self.fc2(h) * (1 + 1e-7 * size)


def made_on_the_way(self: Any, h: Tensor) -> Tensor:
    h = nn.Sequential(nn.LeakyReLU(0.1), nn.Identity())(h)
    return nn.LogSoftmax(dim=1)(self.fc2(nn.Dropout(0.2)(h)))


def asked_for_its_kind(self: Any, h: Tensor) -> Tensor:
    given = [h] if isinstance(h, Tensor) else h
    if not torch.is_tensor(given[0]) or isinstance(h, list | tuple):
        raise TypeError("tensors are needed")
    return self.fc2(torch.relu(given[0]))


def sized(self: Any, h: Tensor) -> Tensor:
    rows = h.view(len(h), h.shape[1:].numel())
    if rows.shape != h.shape or rows.repeat(2, 1).size() != (2 * h.size(0), 12) or h.size(0) != rows.size(0):
        raise ValueError("sizes")
    return self.fc2(rows + torch.eye(12)[0].expand(len(h), 12))


def all_of_them(self: Any, h: Tensor) -> Tensor:
    picked = h[h.abs().sum(1) > 0]
    return self.fc2(picked if picked.size(0) == h.size(0) else h * 0)


def how_many(self: Any, h: Tensor) -> Tensor:
    return self.fc2(h * (2 if h.size(0) == 7 else 1))


def are_they_all(self: Any, h: Tensor) -> Tensor:
    picked = h[h.abs().sum(1) > 0]
    return self.fc2(picked if h.size(0) == picked.size(0) else h * 0)


def if_there_are_any(self: Any, h: Tensor) -> Tensor:
    return self.fc2(h) if len(h) else self.fc2(h * 0)


def like_a_parameter(self: Any, h: Tensor) -> Tensor:
    weight = next(self.parameters())
    return self.fc2(h + weight.new_ones(len(h), 12) + weight.data.new(h.size(0), 12).fill_(0.5))


def by_a_buffer(self: Any, h: Tensor) -> Tensor:
    if self.limit > 0.1 and bool((self.count == 3).all()):
        h = h[:, : self.count.item()].sum(1, keepdim=True) + h
    return self.fc2(h / self.limit.item())


def by_a_travelling_buffer(self: Any, h: Tensor) -> Tensor:
    return self.fc2(h if self.travelling > 0.1 else h / 2)


def listed(self: Any, h: Tensor) -> Tensor:
    return self.fc2(torch.relu(self.parts[0](h)))


def norm_by_hook() -> nn.Module:
    return Images(lambda self, h: self.fc2(self.normed(h)), normed=nn.utils.weight_norm(nn.Linear(12, 12)))


def convolution_by_hook() -> nn.Module:
    layer = nn.utils.weight_norm(nn.Conv1d(8, 8, 3, padding=1))
    return Texts(layer, lambda layer, x, tokens: torch.tanh(layer(x.transpose(1, 2))).transpose(1, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True), 2)
    return Texts(layer, lambda layer, x, tokens: layer(x, src_key_padding_mask=tokens == 0))


def decoder() -> nn.Module:
    layer = nn.Transformer(8, 2, 1, 1, 12, 0.1, batch_first=True)
    return Texts(layer, lambda layer, x, tokens: layer(x, x[:, :3], src_key_padding_mask=tokens.eq(59)))


def shapes_as_in_transformers() -> nn.Module:
    def attend(layer: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
        batch, length, size = x.size()
        q, k, v = (
            one.view(batch, length, 2, size // 2).transpose(1, 2).reshape(batch * 2, length, -1)
            for one in layer(x).chunk(3, -1)
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(size // 2)
        if scores.size() != (batch * 2, length, length):
            raise ValueError(f"scores of shape {scores.size()}")
        return torch.bmm(scores.softmax(-1), v).view(batch, 2, length, -1).transpose(1, 2).reshape(batch, length, size)

    return Texts(nn.Linear(8, 24), attend)


class Meter:
    """A mean over calls, as every second tutorial has it."""

    def __init__(self) -> None:
        self.count = 0

    def __repr__(self) -> str:
        return f"{self.count}"

    def update(self) -> int:
        self.count += 1
        return self.count


SLOWLY: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a tensor's data": (lambda: torch.zeros(()), lambda calls: float(calls.data.add_(1))),
    "an array": (lambda: np.zeros(1), lambda calls: float(np.add(calls, 1, out=calls)[0])),
    "a queue": (deque, lambda calls: calls.append(1) or len(calls)),
    "a set": (set, lambda calls: calls.add(len(calls)) or len(calls)),
    "a list in a dictionary": (lambda: {"all": []}, lambda calls: calls["all"].append(1) or len(calls["all"])),
    "an object": (Meter, Meter.update),
    "a tensor in a list": (lambda: [torch.zeros(())], lambda calls: float(calls[0].add_(1))),
}
"""What a module holds, and how it counts its calls in it."""


def sorted_by_name(self: Any, h: Tensor) -> Tensor:
    return self.fc2(self.same(h.sort(1)).values)


def clipped(self: Any, h: Tensor) -> Tensor:
    """Gradients that are beyond anything that the trial of a form meets."""
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-1000, 1000))
    return self.fc2(h)


def clipped_before_a_layer() -> nn.Module:
    module = Images(lambda self, h: self.fc2(h))
    module.fc2.register_full_backward_pre_hook(lambda _, gradients: (gradients[0].clamp(-1000, 1000),))
    return module


def asked_of_a_parameter(self: Any, h: Tensor) -> Tensor:
    return self.fc2(h * 2 if self.token.requires_grad and not self.limit.requires_grad else h) + self.token.sum()


def images(forward: Callable[[Any, Tensor], Tensor], **held: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Images(forward, **{name: make() for name, make in held.items()})


def none() -> None:
    return None


CASES: dict[str, tuple[object, Callable[[], nn.Module], str]] = {
    "a hook on a value": (IMAGES, images(clipped), "what happens depends"),
    "a hook before a layer's gradient": (IMAGES, clipped_before_a_layer, "has hooks"),
    "whether a parameter has a gradient": (IMAGES, images(asked_of_a_parameter), ""),
    "several values with names": (IMAGES, images(sorted_by_name, same=nn.Identity), ""),
    "notes for later": (IMAGES, images(noted, features=none, maps=dict), ""),
    "a table made once": (IMAGES, images(cached, table=none, length=int), ""),
    "a buffer made once": (IMAGES, images(buffer_made), ""),
    "every other call": (IMAGES, images(every_other_call, calls=int), "keeps something"),
    "a tensor that counts": (IMAGES, images(counted_tensor, calls=lambda: torch.tensor(0.0)), "keeps something"),
    "a tensor that counts in place": (
        IMAGES,
        images(counted_in_place, calls=lambda: torch.tensor(0.0)),
        "keeps something",
    ),
    "two calls before": (IMAGES, images(two_calls_before, earlier=none, last=none), "keeps something"),
    "a part in evaluation mode": (
        IMAGES,
        images(in_evaluation, norm=lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
        "keeps something",
    ),
    "a list that grows": (IMAGES, images(collected, seen=list), "keeps something"),
    "another first call": (IMAGES, images(prepared_once, ready=bool, shift=none), "keeps something"),
    "entries assigned": (IMAGES, images(assigned), ""),
    "a parameter's entries assigned": (IMAGES, images(assigned_to_a_parameter), "what parameters are made of"),
    "parameters clipped one by one": (IMAGES, images(clipped_one_by_one), "clamp_ changes parameters"),
    "a buffer of the state": (IMAGES, images(read_from_the_state), "buffers are read that are not called by their"),
    "parameters written over": (IMAGES, images(written_over), "ones changes parameters"),
    "parameters replaced one by one": (IMAGES, images(replaced_one_by_one), "clone reads parameters"),
    "parameters replaced by new ones": (IMAGES, images(replaced_by_new_ones), "replaces the values of parameters"),
    "a frozen mean": (
        IMAGES,
        images(followed_by_a_mean, mean=lambda: nn.Linear(12, CLASSES).requires_grad_(False)),
        "mul_ changes parameters",
    ),
    "all weights": (IMAGES, images(slightly_by_all_weights), "abs reads parameters"),
    "all weights without a gradient": (IMAGES, images(slightly_without_gradient), "reads parameters"),
    "layers made on the way": (IMAGES, images(made_on_the_way), ""),
    "asked for its kind": (IMAGES, images(asked_for_its_kind), ""),
    "sizes": (IMAGES, images(sized), ""),
    "as many as that": (IMAGES, images(how_many), "how many they are"),
    "are they all": (IMAGES, images(are_they_all), "how many they are"),
    "are these all": (IMAGES, images(all_of_them), "how many they are"),
    "any at all": (IMAGES, images(if_there_are_any), "how many they are"),
    "like a parameter": (IMAGES, images(like_a_parameter), ""),
    "by a buffer": (IMAGES, images(by_a_buffer), ""),
    "by a buffer that travels": (IMAGES, images(by_a_travelling_buffer), "values"),
    "layers in a list": (IMAGES, images(listed, parts=lambda: [nn.Linear(12, 12).double()]), "nn.ModuleList"),
    "weight norm by a hook": (IMAGES, norm_by_hook, ""),
    "weight norm of a convolution": (TEXTS, convolution_by_hook, ""),
    "encoder that sees no padding": (TEXTS, encoder, ""),
    "encoder and decoder": (TEXTS, decoder, ""),
    "shapes as in transformers": (TEXTS, shapes_as_in_transformers, ""),
}
"""Name -> data, module, and a part of the reason why it is not followed; empty where it is."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*weight_norm.* is deprecated")
def test_a_habit_is_followed_to_the_same_values_or_refused_for_a_reason(name: str):
    description, make, reason = CASES[name]
    torch.manual_seed(1)
    model = FlatModel(make().double())
    before = {id(part): dict(vars(part)) for part in model.module.modules()}
    collections = [one for one in vars(model.module).values() if isinstance(one, list | dict)]
    contents = [one.copy() for one in collections]
    values = [one.detach().clone() for one in model.module.parameters()]
    found = why_not_stackable(model.module, description)
    assert (found is None) == (not reason), found
    assert reason in str(found)
    for part in model.module.modules():
        held = before[id(part)]
        assert vars(part).keys() == held.keys()
        assert all(now is held[name] for name, now in vars(part).items())
    assert collections == contents
    assert all(map(torch.equal, model.module.parameters(), values))
    if found is None:
        source, tasks = Source(description, SIZES, torch.float64), tasks_for(SIZES)
        expected, _ = train(SequentialEngine(model, source, STREAMS), tasks, model.initial, RULE)
        together, _ = train(BatchedEngine(model, source, STREAMS), tasks, model.initial, RULE)
        assert relative_difference(expected, model.initial) > 1e-4, "training must have changed the model"
        assert relative_difference(together, expected) < 1e-12


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torchscript_is_called_one():
    module = nn.Sequential(nn.Flatten(), torch.jit.script(nn.BatchNorm1d(196)), nn.Linear(196, CLASSES))
    assert why_not_stackable(module, IMAGES) == "Sequential is compiled by TorchScript, whole or in part"


@pytest.mark.parametrize("how", SLOWLY)
def test_what_counts_too_slowly_to_be_noticed_in_its_outputs_is_noticed_in_what_it_holds(how: str):
    make, count = SLOWLY[how]
    module = Images(slowly(count), calls=make())
    first = repr(module.calls)
    assert why_not_stackable(module, IMAGES) == "Images keeps something from one call to the next"
    assert repr(module.calls) == first


def test_torch_and_the_modules_names_are_as_before_when_a_module_was_followed():
    names = [getattr(torch, name) for name in values.FACTORIES], torch.is_tensor, dict(vars(functional)), set(globals())
    assert why_not_stackable(Images(sized), IMAGES) is None
    assert why_not_stackable(Images(how_many), IMAGES) is not None
    assert names[0] == [getattr(torch, name) for name in values.FACTORIES]
    assert names[1] is torch.is_tensor
    assert names[2].keys() == vars(functional).keys()
    assert names[3] == set(globals())
    assert not {"new", "new_zeros", "expand"} & vars(Tensor).keys()
