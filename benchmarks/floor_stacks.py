"""Batched floor: copies of a small network for a few clients, with forward and backward pass written by hand.

Every product is one batched matrix product over the clients. The SGD step is part of the product of the weight gradient
(w ← w − lr · dᵀx). Convolutions are products over patches, and activations are channels-last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.types import Ints


class Product:
    """A dense layer, or a convolution over patches: k copies of a matrix (o, i) and a bias (o,)."""

    def __init__(self, layer: Any, copies: int, order: Tensor, lr: float):
        self.order, self.lr = order, lr
        outputs = len(layer.bias)
        self.shape = layer.weight.shape
        self.w = torch.empty(copies, outputs, layer.weight.numel() // outputs)
        self.b = torch.empty(copies, outputs)
        self.back = torch.argsort(order)

    def load(self, weight: Tensor, bias: Tensor) -> None:
        self.w.copy_(weight.reshape(len(bias), -1)[:, self.order])
        self.b.copy_(bias)

    def add_mean(self, factors: Tensor, weight: Tensor, bias: Tensor) -> None:
        k = len(factors)
        mean = torch.einsum("k,koi->oi", factors, self.w[:k])[:, self.back]
        weight.add_(mean.view(self.shape))
        bias.add_(factors @ self.b[:k])

    def forward(self, x: Tensor) -> Tensor:
        k = len(x)
        self.x = x.reshape(k, -1, self.w.shape[2])
        return torch.baddbmm(self.b[:k].unsqueeze(1), self.x, self.w[:k].transpose(1, 2))

    def backward(self, d: Tensor, needed: bool) -> Tensor | None:
        k = len(d)
        back = torch.bmm(d, self.w[:k]) if needed else None
        self.w[:k].baddbmm_(d.transpose(1, 2), self.x, alpha=-self.lr)
        self.b[:k].add_(d.sum(1), alpha=-self.lr)
        return back


class Patches:
    """Conversion of images (k, b, height · width · channels) to patches (k, b · positions, kernel² · channels)."""

    def __init__(self, side: int, channels: int, kernel: int, stride: int):
        self.side, self.channels, self.kernel, self.stride = side, channels, kernel, stride
        self.out = (side - kernel) // stride + 1

    def forward(self, x: Tensor) -> Tensor:
        self.images = x.numel() // (self.side**2 * self.channels)
        image = x.reshape(self.images, self.side, self.side * self.channels)
        row, column = self.side * self.channels, self.stride * self.channels
        windows = image.as_strided(
            (self.images, self.out, self.out, self.kernel, self.kernel * self.channels),
            (self.side * row, self.stride * row, column, row, 1),
        )
        return windows.reshape(len(x), -1, self.kernel**2 * self.channels)

    def backward(self, d: Tensor) -> Tensor:
        image = d.new_zeros(self.images, self.side, self.side, self.channels)
        parts = d.reshape(self.images, self.out, self.out, self.kernel, self.kernel, self.channels)
        reach = self.stride * (self.out - 1) + 1
        for i in range(self.kernel):
            for j in range(self.kernel):
                image[:, i : i + reach : self.stride, j : j + reach : self.stride] += parts[:, :, :, i, j]
        return image


class Stack:
    """Copies of a nn.Sequential of Conv2d, Linear, ReLU, Dropout(0.5) and Flatten."""

    def __init__(self, network: Any, copies: int, lr: float):
        self.layers: list[tuple[str, Any]] = []
        side, channels = 28, 1
        for layer in network:
            if isinstance(layer, nn.Conv2d):
                kernel, stride = layer.kernel_size[0], layer.stride[0]
                self.layers.append(("patches", Patches(side, channels, kernel, stride)))
                order = torch.arange(channels * kernel**2).view(channels, kernel**2).t().reshape(-1)
                self.layers.append(("product", Product(layer, copies, order, lr)))
                side, channels = (side - kernel) // stride + 1, layer.out_channels
            elif isinstance(layer, nn.Linear):
                inputs = layer.in_features
                order = torch.arange(inputs)
                if channels > 1:  # the first dense layer reads a former image, here channels-last
                    order = order.view(channels, side**2).t().reshape(-1)
                    channels = 1
                self.layers.append(("product", Product(layer, copies, order, lr)))
            elif isinstance(layer, nn.ReLU):
                self.layers.append(("relu", None))
            elif isinstance(layer, nn.Dropout):
                self.layers.append(("dropout", None))
        self.products: list[Product] = [part for kind, part in self.layers if kind == "product"]

    def load(self, values: list[Tensor], clients: int) -> None:
        """Set every copy to the model."""
        self.clients = clients
        for product, weight, bias in zip(self.products, values[::2], values[1::2], strict=True):
            product.load(weight, bias)

    def add_mean(self, factors: Tensor, into: list[Tensor]) -> None:
        """Add Σ_k factor_k · copy_k."""
        for product, weight, bias in zip(self.products, into[::2], into[1::2], strict=True):
            product.add_mean(factors, weight, bias)

    def step(self, x: Tensor, y: Tensor, counts: Ints) -> None:
        """One step of SGD of the first k copies on x (k, b, …), y (k, b); client j has counts[j] of the b samples."""
        h: Tensor = x.reshape(len(x), x.shape[1], -1)
        kept: list[Tensor | None] = []
        rows = x.shape[1]
        for kind, part in self.layers:
            mask: Tensor | None = None
            if kind == "product":
                h = part.forward(h if h.shape[-1] == part.w.shape[2] else h.reshape(len(x), rows, -1))
            elif kind == "patches":
                h = part.forward(h.reshape(len(x), rows, -1))
            elif kind == "relu":
                mask = h.relu_()
            else:
                mask = torch.empty_like(h).bernoulli_(0.5).mul_(2.0)
                h = h * mask
            kept.append(mask)
        d = self._loss_gradient(h, y, counts)
        first = self.products[0]
        for (kind, part), mask in zip(reversed(self.layers), reversed(kept), strict=True):
            if kind == "product":
                back = part.backward(d.reshape(len(x), -1, part.w.shape[1]), part is not first)
                if back is None:
                    return
                d = back
            elif kind == "patches":
                d = part.backward(d)
            elif mask is not None:
                d = d.reshape(mask.shape)
                d = torch.ops.aten.threshold_backward(d, mask, 0) if kind == "relu" else d * mask

    def _loss_gradient(self, logits: Tensor, y: Tensor, counts: Ints) -> Tensor:
        d = torch.softmax(logits, -1)
        d.scatter_add_(-1, y.unsqueeze(-1), torch.full((1, 1, 1), -1.0).expand(*y.shape, 1))
        if (counts == y.shape[1]).all():
            return d.mul_(1 / y.shape[1])
        weights = (np.arange(y.shape[1]) < counts[:, None]) / counts[:, None]
        return d.mul_(torch.from_numpy(weights).float().unsqueeze(-1))
