"""The image models of the papers: their sizes follow from their layers, a step on real digits lowers the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.datasets import DATASETS
from data_prep.raw import ReadOptions, Tally
from fedmpi import UserError
from fedmpi.data.schema import DataDescription
from fedmpi.models import build
from fedmpi.models.image_cnns import cifar_cnn, image_cnn
from fedmpi.models.resnet import resnet18
from tests.models.real_samples import describe_images, describe_texts, digits, loss_after_steps

IMAGE_MODELS = {"cifar-cnn": cifar_cnn, "image-cnn": image_cnn, "resnet18": resnet18}


def convolution(inputs: int, outputs: int, kernel: int, bias: bool = True) -> int:
    return outputs * (inputs * kernel**2 + bias)


def dense(inputs: int, outputs: int) -> int:
    return outputs * (inputs + 1)


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_fedsamplings_image_model_has_the_published_number_of_parameters():
    layers = convolution(1, 32, 5) + convolution(32, 128, 5)
    layers += dense(4 * 4 * 128, 512) + 2 * dense(512, 512) + dense(512, 62)
    assert layers == 1_709_566
    assert parameters(image_cnn(describe_images(1, 28, 62))) == layers


def test_the_keras_cnn_has_the_parameters_of_its_layers():
    layers = convolution(3, 32, 3) + convolution(32, 32, 3) + convolution(32, 64, 3) + convolution(64, 64, 3)
    layers += dense(6 * 6 * 64, 512) + dense(512, 10)
    assert parameters(cifar_cnn(describe_images(3, 32, 10))) == layers


def test_resnet18_has_the_parameters_of_its_layers():
    layers = convolution(3, 64, 3, bias=False) + 2 * 64
    for inputs, filters in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += convolution(inputs, filters, 3, bias=False) + 3 * convolution(filters, filters, 3, bias=False)
        layers += 4 * 2 * filters
        if inputs != filters:
            layers += convolution(inputs, filters, 1, bias=False) + 2 * filters
    layers += dense(512, 100)
    assert parameters(resnet18(describe_images(3, 32, 100))) == layers


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_one_step_lowers_the_loss_on_real_digits(name: str):
    channels, side = (1, 28) if name == "image-cnn" else (3, 32)
    torch.manual_seed(1)
    x, y = digits(32, channels, side)
    lr = 0.002 if name == "resnet18" else 0.02
    before, after = loss_after_steps(IMAGE_MODELS[name](describe_images(channels, side, 10)), x, y, lr)
    assert after < before


@pytest.mark.parametrize(("name", "data_set", "lr"), [
    ("cnn", "emnist-balanced", 0.05), ("image-cnn", "emnist-balanced", 0.05), ("cifar-cnn", "cifar10", 0.02),
    pytest.param("resnet18", "cifar100", 0.002, marks=pytest.mark.slow),
])  # fmt: skip
def test_one_step_lowers_the_loss_on_the_data_set_of_its_paper(name: str, data_set: str, lr: float, data_folder: Path):
    folder = data_folder / data_set.partition("-")[0]
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    raw = DATASETS[data_set].read(folder, ReadOptions(), Tally())
    description = DataDescription(raw.feature_shape, "uint8", raw.classes, "image", 0, raw.mean, raw.std)
    mean, std = (torch.tensor(values)[:, None, None] for values in (raw.mean, raw.std))
    x = (torch.from_numpy(raw.read(np.arange(32))) / 255 - mean) / std
    before, after = loss_after_steps(build(name, {}, description, 1), x, torch.from_numpy(raw.labels[:32]), lr)
    assert after < before


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_texts_are_refused(name: str):
    with pytest.raises(UserError, match="reads images"):
        IMAGE_MODELS[name](describe_texts(30, 100, 5))


@pytest.mark.parametrize("name", ["cifar-cnn", "image-cnn"])
def test_images_that_are_too_small_are_refused(name: str):
    with pytest.raises(UserError, match="too small"):
        IMAGE_MODELS[name](describe_images(1, 6, 5))


def test_groups_must_divide_the_width():
    with pytest.raises(UserError, match="divisor"):
        resnet18(describe_images(3, 32, 10), width=48, groups=32)
