"""Algorithms of local work as users write them, from what the documentation shows and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi import LocalAlgorithm, weights


class DynamicLoss(LocalAlgorithm):
    """FedDyn with the whole objective written out."""

    client_state = ("h",)
    server_state = ("h",)

    def objective(self, module: nn.Module, x: Tensor, y: Tensor, client, server, generator) -> Tensor:
        w = torch.nn.utils.parameters_to_vector(module.parameters())
        loss = functional.cross_entropy(module(x), y)
        return loss - client.h @ w + 0.05 * (w - server.model).square().sum()

    def finish(self, client, server, work, generator):
        client.h -= 0.1 * work.delta

    def server_step(self, server, update, sums, totals, generator):
        server.h -= 0.1 * totals.participants / totals.population * update
        return update - server.h / 0.1


class Summing(LocalAlgorithm):
    """Sums what identifies the participants, and a vector of zeros."""

    client_state = ("seen", "other")
    server_state = "total"
    sums = ("ones", "scribble")
    numbers = ("clients",)

    def finish(self, client, server, work, generator):
        assert work.delta.shape == client.seen.shape
        client.seen, client.other = client.other, client.seen + 1
        return {"ones": 1.0, "scribble": work.delta * 0, "clients": 1 + client.index}

    def server_step(self, server, update, sums, totals, generator):
        server.total = sums["ones"]
        assert float(sums["ones"][0]) == totals.participants
        assert not sums["scribble"].any()


class Wrong(LocalAlgorithm):
    """Goes wrong in one of many ways."""

    client_state = ("c",)
    server_state = ("c",)
    sums = ("dc",)

    def __init__(self, *, how: str):
        self.how = how

    def correction(self, client, server, generator):
        if self.how == "raises":
            raise ZeroDivisionError("no such number")
        if self.how == "short":
            return server.c[:3]
        if self.how == "sets the server":
            server.c = client.c
        if self.how == "changes the model":
            server.model.add_(1)
        return None

    def finish(self, client, server, work, generator):
        if self.how == "unknown state":
            client.d = work.delta
        if self.how == "infinite":
            client.c = work.delta / 0
        if self.how == "changes the update":
            work.delta.mul_(2)
        if self.how == "no sum":
            return None
        if self.how == "infinite sum":
            return {"dc": work.delta / 0}
        return {"dc": work.delta}


class Norms(LocalAlgorithm):
    """Sums the lengths of the updates as they were made."""

    numbers = ("norm",)

    def finish(self, client, server, work, generator):
        return {"norm": float(work.delta.norm())}


class Odd(LocalAlgorithm):
    """Corrects every other client's gradients, after its first round."""

    def correction(self, client, server, generator):
        return 0.1 * server.model if (client.index + client.round) % 2 else None


class Aliases(LocalAlgorithm):
    """Lets vectors of the server be the update, and each other."""

    server_state = ("first", "second")

    def server_step(self, server, update, sums, totals, generator):
        if totals.round == 0:
            server.first = update
            server.second = server.first
        else:
            server.first += 1
        return update


class Counting(LocalAlgorithm):
    """Counts rounds before the steps, in place."""

    client_state = ("rounds",)

    def correction(self, client, server, generator):
        client.rounds += 1


class Drawing(LocalAlgorithm):
    """Draws in every hook, and moves the biases of the last layer alone."""

    numbers = ("drawn",)

    def start(self, module, layout, generator):
        self.place, self.first = layout["output.bias"], generator.random()
        assert not module.training and module.output.bias.shape == (self.place.stop - self.place.start,)

    def correction(self, client, server, generator):
        moved = torch.zeros_like(server.model)
        moved[self.place] = generator.standard_normal()
        return moved

    def finish(self, client, server, work, generator):
        assert isinstance(generator, np.random.Generator)
        return {"drawn": generator.random()}

    def server_step(self, server, update, sums, totals, generator):
        return update * (self.first + generator.random())


class Shift(LocalAlgorithm):
    """Adds 1 to every gradient."""

    def correction(self, client, server, generator):
        return torch.ones_like(server.model)


class Noisy(LocalAlgorithm):
    """A loss on samples with noise from torch's own generator."""

    def objective(self, module, x, y, client, server, generator):
        return functional.cross_entropy(module(x + torch.randn_like(x)), y, reduction="none")


@weights
class Judged:
    """Weights that ask how a client's work went, and change nothing."""

    def __call__(self, cohort, sizes):
        return np.ones(len(cohort.clients))

    def after(self, work):
        return work.coefficient


@weights(normalized=False, averages_models=True)
def sum_of_models(cohort, sizes):
    """A plain mean of models."""
    return np.full(len(cohort.clients), 1 / len(cohort.clients))


class Halving(LocalAlgorithm):
    """The loss on halved samples, which may be written over."""

    def __init__(self, *, in_place: bool):
        super().__init__()
        self.in_place = in_place

    def objective(self, module, x, y, client, server, generator):
        halved = x.mul_(0.5) if self.in_place else x * 0.5
        return functional.cross_entropy(module(halved), y, reduction="none")


class Doubling(LocalAlgorithm):
    """Algorithm whose loss uses each sample twice in one pass, or none in small batches."""

    def objective(self, module, x, y, client, server, generator):
        if len(x) < 3:
            return sum(values.square().sum() for values in module.parameters())
        return functional.cross_entropy(module(torch.cat([x, x])), torch.cat([y, y]), reduction="none")
