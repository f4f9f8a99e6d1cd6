"""A custom model trains as torch would train it, whatever surrounds the run, or is rejected before round 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmpi
from fedmpi import ClientArrays, Run, UserError
from fedmpi.common.errors import Divergence
from tests.reference.networks import cumulative_norm

FEATURES = 6
SEQUENTIAL = {"local.engine": "sequential"}
DROPPED = {"local.drop_last": True, "server.weights": "uniform"}


def arrays(sizes: tuple[int, ...] = (20, 20), positive: bool = False) -> ClientArrays:
    """Few samples for clients of these sizes; the first samples are always the same."""
    generator, n = np.random.default_rng(3), sum(sizes)
    x = generator.standard_normal((n, FEATURES)).astype(np.float32)
    x, y = np.abs(x) + 0.1 if positive else x, np.arange(n) % 3
    return ClientArrays(x, y, np.repeat(np.arange(len(sizes)), sizes), test=(x, y))


class Own(nn.Module):
    """A linear network whose outputs `change` spoils in one of the modes."""

    def __init__(self, change: Callable[[Tensor], Any] | None = None, when: str = ""):
        super().__init__()
        torch.manual_seed(5)
        self.change, self.when, self.linear = change, when, nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        spoiled = self.change is not None and self.when == ("training" if self.training else "evaluation")
        return self.change(out) if spoiled and self.change is not None else out


def run(model: Any, data: ClientArrays, more: Mapping[str, Any] | None = None, **given: Any) -> Run:
    settings = {"rounds": 2, "clients.sampler": "all", "local.lr": 0.1, "cluster.threads": 1}
    return fedmpi.run("fedavg", {**settings, **(more or {})}, model=model, data=data, **given)


def values(done: Run) -> Tensor:
    return torch.cat([value.reshape(-1) for value in done.model.state_dict().values()])


# Surroundings of the run


def built(description: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))


def modes() -> tuple[Any, ...]:
    return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_device()


def test_what_surrounds_a_run_changes_nothing_of_it_and_is_there_afterwards() -> None:
    usual, inside = modes(), []
    more = {"clients.sampler": "importance", "clients.count": 2, "evaluation.clients": "all"}
    plain = run(built, arrays(), more)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        before = modes()
        found = run(built, arrays(), more, on_round=lambda record: inside.append(modes()))
        with pytest.raises(UserError):
            run(Own(change=lambda out: (out,), when="evaluation"), arrays())
        assert modes() == before != usual
    assert inside == [usual, usual] and torch.equal(values(found), values(plain))


# Results of the model

WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a tuple": (lambda out: (out, None), "tuple"),
    "a dict": (lambda out: {"loss": out.sum()}, "dict"),
    "nothing": (lambda out: None, "NoneType"),
    "indices": (lambda out: out.argmax(-1), "shape"),
    "one more axis": (lambda out: out.unsqueeze(-1), "shape"),
    "fewer samples": (lambda out: out[:-1], "shape"),
    "twice as many": (lambda out: torch.cat([out, out], -1), "shape"),
    "whole numbers": (lambda out: (out > 0).long(), "torch.int64"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_unusable_outputs_are_rejected_before_round_0(name: str, when: str) -> None:
    (change, said), rounds = WRONG[name], []
    with pytest.raises(UserError, match=f"{when} mode") as error:
        run(Own(change, when), arrays(), on_round=rounds.append)
    assert said in str(error.value) and not rounds


class Masked(Own):
    """Reads positive numbers alone, and gives one class no chance in evaluation mode."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x.log())
        return out if self.training else out.masked_fill(torch.tensor([False, False, True]), -torch.inf)


def test_outputs_and_values_that_are_right_are_not_rejected() -> None:
    done = run(Masked(), arrays(positive=True), {"data.normalize": False})
    assert values(done).isfinite().all() and done.summary["final"]["test_accuracy"] > 0


class Squeezed(Own):
    """Loses the axis of the samples where there is one alone."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).squeeze()


@pytest.mark.parametrize("more", [{}, {"evaluation.batch_size": 13}, {"evaluation.clients": "all"}])
def test_squeeze_is_rejected_only_where_a_batch_has_one_sample(more: dict[str, Any]) -> None:
    """The 40 samples of the test part make three passes and one more."""
    done, plain = (run(network(), arrays(), {**SEQUENTIAL, **more}) for network in (Squeezed, Own))
    assert torch.equal(values(done), values(plain))
    assert done.records[-1]["test_loss"] == plain.records[-1]["test_loss"]
    with pytest.raises(UserError, match=r"squeeze\(\).* client 1, who has 11 samples"):
        run(Squeezed(), arrays(sizes=(20, 11)), more)


# Global models that are not finite

DIVERGING = {"local.steps": 1, "local.batch_size": "all", "server.optimizer.lr": 1e30, "evaluation.every": 5}
FAR = {
    "infinite values": ({"local.lr": 1e10}, "the global model is not finite"),
    "a loss that is no number": ({"local.lr": 1e5}, "the loss on the test samples is"),
    "a loss that says nothing": ({"local.lr": 1.0, "server.optimizer.lr": 1e16}, "the loss on the test samples is"),
}


@pytest.mark.parametrize("how", FAR)
def test_a_global_model_out_of_range_is_a_divergence(how: str, tmp_path: Path) -> None:
    more, said = FAR[how]
    network = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises((Divergence, fedmpi.ClientFailure), match=said):
        run(network, arrays(), {**DIVERGING, **more, "rounds": 1}, out=tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


# Batches of one sample


class Normed(nn.Module):
    """Batch norm between two layers."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(5)):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), norm(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Standardized(nn.Module):
    """Divides by the deviation of a batch, in training mode, without a check for a single sample."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (0.1 + x.std(0)) if self.training else x


def standardized() -> nn.Module:
    return Normed(Standardized)


LONE = [
    ((20, 11, 30), {}, "local.batch_size = 10 and client 1, who has 11 samples"),
    ((20, 1, 31), {"local.steps": 2}, "client 1, who has 1 sample"),
    ((20, 30), {"local.batch_size": 1, "local.drop_last": True}, "local.batch_size = 1"),
    ((20, 30), {"samples.sampler": "bernoulli", "samples.budget": 9}, 'samples.sampler = "bernoulli"'),
    ((20, 31), {"local.steps": 2, "evaluation.clients": "all", "evaluation.fine_tune": 1}, "client 1, who has 31"),
    (
        (20, 30),
        {"clients.sampler": "importance", "clients.count": 1, "clients.sampler.features.probe": "sample"},
        'clients.sampler.features.probe = "sample"',
    ),
]


@pytest.mark.parametrize(("sizes", "more", "said"), LONE)
def test_batches_of_one_sample_are_rejected_by_the_clients_names(
    sizes: tuple[int, ...], more: dict[str, Any], said: str
) -> None:
    data = arrays(sizes=sizes)
    for network in (Normed, standardized) if more else (Normed,):
        with pytest.raises(UserError) as error:
            run(network(), data, more)
        assert said in str(error.value), str(error.value)
    if not more:
        assert run(Normed(lambda: nn.GroupNorm(1, 5)), data).ending == "finished"


@pytest.mark.parametrize("more", [{}, {"server.exact": True}, {"local.algorithm": "scaffold"}])
def test_clients_with_one_sample_count_as_clients_without_any(more: dict[str, Any]) -> None:
    """Batch order and initial values go by the number of the client: without the last ones all is as it was."""
    more = {**more, "local.drop_last": True, "data.normalize": False}
    few, all_of_them = (run(Normed(), arrays(sizes=sizes), more) for sizes in ((31, 7), (31, 7, 1, 1)))
    if "local.algorithm" not in more:  # the server's control variates are means over all clients
        torch.testing.assert_close(values(few).float(), values(all_of_them).float(), rtol=1e-5, atol=1e-6)
    assert [record["steps"] for record in few.records] == [record["steps"] for record in all_of_them.records] == [4, 4]


LONELY: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((9, 8, 7, 6, 5), {"samples.sampler": "bernoulli", "samples.budget": 8, "local.batch_size": 2}),
    ((9, 8, 7, 6, 5), {"samples.sampler": "ratio", "samples.sampler.ratio": 0.2, "local.batch_size": 9}),
    ((1025, 7, 1), {"clients.sampler": "importance", "clients.count": 2}),  # a probe passes 1,024 samples at once
    ((31, 7, 1, 20), {"topology": "mediators", "topology.clients_per_mediator": 2, "topology.scheduling": "random"}),
]


@pytest.mark.parametrize(("sizes", "more"), LONELY)
def test_clients_with_one_sample_do_not_train_in_that_round(sizes: tuple[int, ...], more: dict[str, Any]) -> None:
    done = run(Normed(), arrays(sizes=sizes), {"rounds": 3, "local.drop_last": True, **more})
    assert values(done).isfinite().all() and sum(record["samples"] for record in done.records) > 0


# Modules without values


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(FEATURES, 3)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)), on_meta])
def test_modules_without_values_are_rejected(make: Callable[[], nn.Module]) -> None:
    for model in (make(), lambda description: make()):
        with pytest.raises(UserError, match="has no values yet|cannot be saved"):
            run(model, arrays())


# Several ranks: tests.mpi.test_api_ranks


def outcomes() -> list[str]:
    """The ends of some runs: the first values of the model, or the error."""
    ragged = arrays(sizes=(31, 7, 20, 1))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        found = [outcome(built, arrays())]
    return [
        *found,
        outcome(nn.Linear(6, 3, device="meta"), arrays()),
        outcome(Own(change=lambda out: (out,), when="evaluation"), arrays()),
        outcome(Normed(), ragged),
        outcome(Normed(), ragged, {"local.drop_last": True}),
        outcome(built, arrays(), {**DIVERGING, "local.lr": 1e10, "rounds": 1}),
    ]


def outcome(model: Any, data: ClientArrays, more: Mapping[str, Any] | None = None) -> str:
    try:
        return " ".join(f"{one:.4f}" for one in values(run(model, data, more)).double()[:5].tolist())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Integer buffers


def test_integer_buffers_are_combined_by_their_maximum_as_in_a_plain_loop() -> None:
    data = arrays((20, 9, 30))
    torch.manual_seed(5)
    model, owner = cumulative_norm(data.description), np.repeat(np.arange(3), (20, 9, 30))
    found = run(model, data, {"rounds": 3, "local.epochs": 4, "local.batch_size": 10, **DROPPED})
    assert found.model.layers[1].num_batches_tracked == 3 * 4 * 3  # batches of the largest client
    done = run(model, data, {"rounds": 3, "local.epochs": 4, "local.batch_size": "all", **DROPPED})
    for _ in range(3):
        states = []
        for client in range(3):
            own, rows = copy.deepcopy(model).train(), owner == client
            for _ in range(4):
                x, y = torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])
                loss = nn.functional.cross_entropy(own(x), y)
                gradients = torch.autograd.grad(loss, [*own.parameters()])
                with torch.no_grad():
                    for value, gradient in zip(own.parameters(), gradients, strict=True):
                        value -= 0.1 * gradient
            states.append(own.state_dict())
        joined = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        model.load_state_dict(
            {name: all.mean(0) if all.is_floating_point() else all.amax(0) for name, all in joined.items()}
        )
    for name, value in model.state_dict().items():
        assert torch.allclose(done.model.state_dict()[name], value, atol=1e-5), name


class Failing(nn.Module):
    """A linear network that gives wrong outputs after four batches, which it counts in an integer buffer."""

    batches: Tensor

    def __init__(self, description: Any):
        super().__init__()
        self.linear = nn.Linear(FEATURES, 3)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training
        return self.linear(x) * (1 - 2 * (self.batches > 4).float())


def test_noise_keeps_what_clients_count_to_themselves() -> None:
    pytest.importorskip("dp_accounting")
    private = {"server.weights": "uniform", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 1.0}
    assert int(run(Failing, arrays(), private).model.state_dict()["batches"]) == 0


def test_the_best_model_has_the_integer_buffers_of_its_round(tmp_path: Path) -> None:
    keys = {"rounds": 6, "local.steps": 1, "local.lr": 0.5, "checkpoint.every": 3}
    stops = iter([False] * 4 + [True])
    run(Failing, arrays(), keys, out=tmp_path / "run", stop=lambda: next(stops))
    done = run(Failing, arrays(), keys, out=tmp_path / "run", resume=True)
    best, x, y = done.summary["best_round"], *arrays().test
    assert best < 4 < int(done.model.state_dict()["batches"])
    for model in (done.best_model, fedmpi.load_run(tmp_path / "run").best_model):
        assert int(model.state_dict()["batches"]) == best + 1
        right = model(torch.from_numpy(x)).argmax(1) == torch.from_numpy(y)
        assert float(right.double().mean()) == done.summary["best_test_accuracy"]
