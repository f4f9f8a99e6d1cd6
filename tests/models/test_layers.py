"""What the translation into stacked layers accepts, and the geometry of the convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmpi.data.schema import DataDescription
from fedmpi.models.stacked import form_check
from fedmpi.models.stacked.graph import GraphLayer
from fedmpi.models.stacked.image import Geometry
from fedmpi.models.stacked.net import stacked_form, why_not_stackable

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
    net = stacked_form(module, IMAGES)
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


class Undecided(nn.Linear):
    """Asks for the values of the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Counting(nn.Linear):
    """Asks how many samples there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (1 if x.shape[0] > 2 else 2)


class Averaging(nn.Linear):
    """Lets the samples of a batch see one another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Mixing(nn.Linear):
    """Lets them see one another in what vmap computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.logsumexp(x @ self.weight.T, 0)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.alpha_dropout(super().forward(x), 0.5, self.training)


class Remembering(nn.Linear):
    """Adds to what it gives a share of what it gave the last time."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y = y if self.last is None else y + self.last.mean(0) / 2
        self.last = y.detach()
        return y


class Transposing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).T


def own(kind: type[nn.Module], *options: object) -> nn.Module:
    return nn.Sequential(nn.Flatten(), kind(128, 3, *options))


REFUSED = {
    "batch norm": (flat_linear(nn.BatchNorm2d(2)), "BatchNorm2d"),
    "batch norm without statistics": (flat_linear(nn.BatchNorm2d(2, track_running_stats=False)), "see one another"),
    "the samples' values": (own(Undecided), "values or on how many"),
    "the number of samples": (own(Counting), "values or on how many"),
    "a mean over the samples": (own(Averaging), "see one another"),
    "a sum over the samples of what has parameters": (own(Mixing), "see one another"),
    "torch's generator": (own(Noisy), "alpha_dropout draws from torch's own generator"),
    "a memory": (own(Remembering), "kept from the call before"),
    "outputs turned around": (own(Transposing), "one row of outputs a sample"),
    "hooks": (hooked(), "hooks"),
    "what cannot read the data": (nn.Sequential(nn.Linear(7, 3)), "cannot be followed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_stacked_form_is_refused_with_the_reason(case: str):
    module, word = REFUSED[case]
    assert stacked_form(module, IMAGES) is None
    assert word in str(why_not_stackable(module, IMAGES))


def test_what_cannot_be_followed_is_named_with_its_line():
    reason = str(why_not_stackable(own(Undecided), IMAGES))
    assert "test_layers.py, line" in reason


def test_the_trial_of_a_stacked_form_leaves_the_module_and_the_generator_as_they_were():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(108, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()
    state = torch.get_rng_state()
    assert stacked_form(module, IMAGES) is not None
    assert not module.training and module[2].p == 0.5
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert vars(module).keys() == vars(nn.Sequential()).keys()


def test_layers_one_after_another_have_the_forms_written_by_hand_however_they_are_called():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 3, 3), nn.Linear(27, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.max_pool2d(nn.functional.relu(self.conv(x)), 2)
            return self.fc(torch.flatten(x, 1))

    modules = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))
    assert stacked_form(Functional(), IMAGES).layers == stacked_form(modules, IMAGES).layers


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_padding_with_an_images_own_values_is_left_to_the_graph(mode: str, padding: int | str):
    net = stacked_form(flat_linear(nn.Conv2d(2, 2, 3, padding=padding, padding_mode=mode)), IMAGES)
    assert net is not None and any(isinstance(layer, GraphLayer) for layer in net.layers)


def test_texts_may_have_any_layers_before_and_after_their_words():
    padded = nn.Sequential(nn.Embedding(11, 4, padding_idx=0), nn.Flatten(), nn.Linear(24, 3))
    net = stacked_form(padded, TEXTS)
    assert net.embedding.padding == 0 and len(net.slots) == 2


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(108, 3), nn.Softplus()
    )


def test_rounding_is_no_reason_to_refuse_a_stacked_form(monkeypatch: pytest.MonkeyPatch):
    """A limit below every rounding stands for networks whose gradients jump."""
    monkeypatch.setitem(form_check.TOLERANCE, torch.float32, 0.0)
    assert stacked_form(dropping(), IMAGES) is not None


@pytest.mark.parametrize("part", [0, 1], ids=["outputs", "gradients"])
def test_a_form_that_is_off_by_more_than_rounding_is_refused(part: int, monkeypatch: pytest.MonkeyPatch):
    """The masks of the tries are the client's own: with others, every difference would be explained."""
    monkeypatch.setitem(form_check.TOLERANCE, torch.float32, 0.0)
    form = form_check._stacked

    def off(*given):
        found = form(*given)
        found[1][part].mul_(1.001)
        return found

    monkeypatch.setattr(form_check, "_stacked", off)
    assert stacked_form(dropping(), IMAGES) is None
    assert "gives other" in str(why_not_stackable(dropping(), IMAGES))
