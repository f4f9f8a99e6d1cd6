"""What the translation into stacked layers accepts, and the geometry of the convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked.image import Geometry
from fedmpi.models.stacked.net import stacked, why_not_stackable

IMAGES = DataDescription((2, 8, 8), "float32", 3, "image", 0, (), ())
TEXTS = DataDescription((6,), "int32", 3, "text", 11, (), ())


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3), (1, 1), (0, 0)), ((5, 2), (2, 3), (0, 0)), ((3, 5), (2, 1), (1, 2))]
)
def test_unfolding_by_the_index_is_torchs_unfolding(kernel, stride, padding):
    geometry = Geometry((2, 9, 8), kernel, stride, padding)
    image = torch.randn(1, 2, 9, 8)
    padded = torch.cat([image.reshape(-1), torch.zeros(1)])
    expected = nn.functional.unfold(image, kernel, stride=stride, padding=padding)
    unfolded = padded[geometry.unfold_index()].view(expected.shape)
    assert torch.equal(unfolded, expected)
    assert expected.shape[1] == geometry.patch
    assert expected.shape[2] == geometry.output[0] * geometry.output[1]


def test_every_parameter_of_a_stack_starts_at_a_multiple_of_64_bytes_and_none_overlap():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 7), nn.ReLU(), nn.Linear(7, 3))
    net = stacked(module, IMAGES)
    assert net is not None
    ends = [0] + [slot.start + slot.size for slot in net.slots]
    assert all(slot.start % 16 == 0 and slot.start >= end for slot, end in zip(net.slots, ends, strict=False))
    assert [slot.offset for slot in net.slots] == [0, 54, 57, 813, 820, 841]
    assert net.size == sum(p.numel() for p in module.parameters()) == 844


def flat_linear(*before: nn.Module, inputs: int = 128) -> nn.Sequential:
    return nn.Sequential(*before, nn.Flatten(), nn.Linear(inputs, 3))


def tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return flat_linear_then(first, second)


def flat_linear_then(*after: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 3), *after)


def frozen() -> nn.Module:
    module = flat_linear()
    module[1].bias.requires_grad = False
    return module


def hooked() -> nn.Module:
    module = flat_linear()
    module[1].register_forward_hook(lambda *_: None)
    return module


class Own(nn.Linear):
    """A layer of the user's: its forward pass may be anything."""


REFUSED = {
    "batch norm": (flat_linear(nn.BatchNorm2d(2)), "BatchNorm2d"),
    "groups": (flat_linear(nn.Conv2d(2, 2, 3, groups=2), inputs=72), "groups"),
    "reflecting padding": (flat_linear(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")), "padding"),
    "a subclass": (nn.Sequential(nn.Flatten(), Own(128, 3)), "Own"),
    "tied weights": (tied(), "shared"),
    "frozen parameters": (frozen(), "frozen"),
    "hooks": (hooked(), "hooks"),
    "no flatten": (nn.Sequential(nn.Linear(8, 3)), "Linear"),
    "ends without logits": (flat_linear_then(nn.ReLU(), nn.Flatten(), nn.ReLU()), "last layer"),
    "wrong number of logits": (nn.Sequential(nn.Flatten(), nn.Linear(128, 4)), "last layer"),
    "channel dropout": (flat_linear(nn.Dropout2d(0.5)), "Dropout2d"),
    "a module of one's own": (nn.Bilinear(2, 2, 2), "Bilinear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_stacked_form_is_refused_with_the_reason(case: str):
    module, word = REFUSED[case]
    assert stacked(module, IMAGES) is None
    assert word in str(why_not_stackable(module, IMAGES))


def test_texts_need_an_embedding_first():
    assert why_not_stackable(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), TEXTS) is not None
    padded = nn.Sequential(nn.Embedding(11, 4, padding_idx=0), nn.Flatten(), nn.Linear(24, 3))
    assert "padding_idx" in str(why_not_stackable(padded, TEXTS))
