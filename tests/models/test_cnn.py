"""Astraea's CNN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedmpi import UserError
from fedmpi.models.image_cnns import astraea_cnn
from tests.local.synthetic import IMAGES, SMALL_IMAGES, TEXTS


def test_it_has_the_68_873_parameters_of_the_paper():
    assert sum(p.numel() for p in astraea_cnn(IMAGES).parameters()) == 68_873


def test_dropout_follows_the_first_two_convolutions():
    kinds = [type(layer) for layer in astraea_cnn(IMAGES) if isinstance(layer, nn.Conv2d | nn.Dropout)]
    assert kinds == [nn.Conv2d, nn.Dropout, nn.Conv2d, nn.Dropout, nn.Conv2d]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 20, 44)])
def test_other_image_sizes_work(shape: tuple[int, int, int]):
    description = replace(IMAGES, feature_shape=shape)
    assert astraea_cnn(description).eval()(torch.zeros(2, *shape)).shape == (2, 47)


def test_images_that_are_too_small_or_no_images_are_refused():
    with pytest.raises(UserError, match="6 × 6 pixels are too small$"):
        astraea_cnn(SMALL_IMAGES)
    with pytest.raises(UserError, match=r"28 × 1 pixels are too small: 28 channels\? They come first"):
        astraea_cnn(replace(IMAGES, feature_shape=(28, 28, 1)))
    with pytest.raises(UserError, match="reads images"):
        astraea_cnn(TEXTS)
    with pytest.raises(UserError, match="dropout"):
        astraea_cnn(IMAGES, dropout=1.0)
