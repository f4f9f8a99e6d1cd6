"""FedJAX: its federated averaging, one compiled step per batch, on one core; more cores do not make XLA faster.

JAX cannot use torch modules, so the networks are written again, with the same initial weights. FedJAX's batches are
always full: a client's last batch is filled up by repeating its own samples. Clients smaller than B therefore cost a
whole batch, and the test loss differs slightly from the others'. Steps and samples are computed from its cohorts, not
counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from benchmarks.peers.race import Race

jax.tree_map = jax.tree_util.tree_map  # removed from JAX after FedJAX's last release

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

Weights = list[Any]
Forward = Callable[[Weights, Any, Any], Any]


def to_jax(network: nn.Module) -> Weights:
    """Return the parameters in torch's order, inputs and outputs last, as JAX multiplies them."""
    tables = word_tables(network)
    values = ((id(parameter) in tables, parameter.detach().numpy()) for parameter in network.parameters())
    return [jnp.asarray(value if table else channels_last(value)) for table, value in values]


def to_torch(weights: Weights, network: nn.Module) -> None:
    """Copy JAX's weights into the network."""
    tables = word_tables(network)
    with torch.no_grad():
        for parameter, weight in zip(network.parameters(), weights, strict=True):
            value = np.asarray(weight)
            value = value if id(parameter) in tables else channels_first(value)
            parameter.copy_(torch.from_numpy(value.copy()))


def word_tables(network: nn.Module) -> set[int]:
    """Return the indices of the word vectors, which have the same layout in both."""
    return {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}


def channels_last(weight: Any) -> Any:
    """Convert (outputs, inputs, positions...) to (positions..., inputs, outputs)."""
    return weight.transpose(*range(2, weight.ndim), 1, 0) if weight.ndim > 1 else weight


def channels_first(weight: Any) -> Any:
    """Convert (positions..., inputs, outputs) to (outputs, inputs, positions...)."""
    last = weight.ndim - 1
    return weight.transpose(last, last - 1, *range(last - 1)) if weight.ndim > 1 else weight


def dense(x: Any, weight: Any, bias: Any) -> Any:
    return x @ weight + bias


def convolution(x: Any, weight: Any, bias: Any, stride: int = 1) -> Any:
    """Convolve images (n, height, width, channels) or texts (n, words, values)."""
    layout = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC")
    strides = (stride,) * (x.ndim - 2)
    return jax.lax.conv_general_dilated(x, weight, strides, "VALID", dimension_numbers=layout) + bias


def mlp(p: Weights, x: Any, key: Any) -> Any:
    hidden = jax.nn.relu(dense(x.reshape(len(x), -1), *p[0:2]))
    return dense(jax.nn.relu(dense(hidden, *p[2:4])), *p[4:6])


def cnn(p: Weights, x: Any, key: Any) -> Any:
    """Return the logits; `key` draws the dropout, and None means evaluation."""
    maps = jax.nn.relu(convolution(x.reshape(-1, 28, 28, 1), p[0], p[1], stride=2))
    maps = jax.nn.relu(convolution(maps, p[2], p[3], stride=2))
    if key is not None:
        maps = jnp.where(jax.random.bernoulli(key, 0.5, maps.shape), 2 * maps, 0)
    maps = jax.nn.relu(convolution(maps, *p[4:6]))
    flat = maps.transpose(0, 3, 1, 2).reshape(len(x), -1)  # in torch's order
    return dense(jax.nn.relu(dense(flat, *p[6:8])), *p[8:10])


def text_cnn(p: Weights, x: Any, key: Any) -> Any:
    words = p[0][x]
    maxima = [convolution(words, *p[at : at + 2]).max(1) for at in (1, 3, 5)]
    return dense(jax.nn.relu(jnp.concatenate(maxima, 1)), *p[7:9])


NETWORKS: dict[str, Forward] = {"mlp": mlp, "cnn": cnn, "text_cnn": text_cnn}


def algorithm(race: Race) -> Any:
    """Build federated averaging of one local epoch."""
    workload, forward = race.workload, NETWORKS[race.workload.model.partition(":")[2]]

    def loss(weights: Weights, batch: dict[str, Any], key: Any) -> Any:
        logs = jax.nn.log_softmax(forward(weights, batch["x"], key))
        return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()

    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=1, drop_remainder=False)
    local, central = fedjax.optimizers.sgd(workload.lr), fedjax.optimizers.sgd(1.0)
    return fed_avg.federated_averaging(jax.grad(loss), local, central, batches)


def main() -> None:
    race = Race(__doc__)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: race.processes])
    averaging = algorithm(race)
    clients = [fedjax.ClientDataset({"x": x.numpy(), "y": y.numpy()}) for x, y in race.clients]
    state = averaging.init(to_jax(race.network))
    for round in range(race.workload.rounds):
        started = time.perf_counter()
        cohort = race.workload.participants(round).tolist()
        keys = jax.random.split(jax.random.PRNGKey(round), len(cohort))
        state, _ = averaging.apply(state, [(k, clients[k], key) for k, key in zip(cohort, keys, strict=True)])
        jax.block_until_ready(state.params)
        race.note(time.perf_counter() - started)
    to_torch(state.params, race.network)
    race.finish(race.network)


if __name__ == "__main__":
    main()
