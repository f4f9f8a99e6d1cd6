"""Personal models: runs equal plain loops written from the papers, in float64. Only initial values are fedmpi's."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedmpi
from fedmpi import ClientArrays, UserError
from fedmpi.models import build

SIZES, HELD = (9, 14, 2, 20, 11, 3, 5), (4, 3, 5, 2, 6, 1, 3)
ROUNDS, LR = 4, 0.2
State = dict[str, Tensor]


class Net(nn.Module):
    """Two layers with batch norm between them, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.bn, self.head = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bn(self.body(x.double()))))


def net(description: object) -> nn.Module:
    return Net()


def arrays(sizes: tuple[int, ...] = SIZES) -> ClientArrays:
    """Seven clients whose labels and features differ, each with samples held out."""
    generator = np.random.default_rng(3)

    def drawn(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        owner = np.repeat(np.arange(len(sizes)), sizes)
        x = generator.standard_normal((len(owner), 3)) + owner[:, None] / 4
        return x.astype(np.float32), (x[:, 0] > owner / 4).astype(int) + owner % 2, owner

    x, y, owner = drawn(sizes)
    return ClientArrays(x, y, owner, test=(x[:9], y[:9]), val=drawn(HELD))


def run(preset: str, data: ClientArrays | None = None, **changed: Any) -> fedmpi.Run:
    """Four rounds with full batches, in which not every client is selected."""
    settings = {
        "rounds": ROUNDS,
        "clients.sampler": "uniform",
        "clients.count": 3,
        "local.batch_size": "all",
        "local.lr": LR,
        "logging.participants": True,
        "logging.tensorboard": False,
        "cluster.threads": 1,
        "evaluation.clients": "all",
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    return fedmpi.run(preset, settings, data=data or arrays(), model=net)


def samples(held_out: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Each client's samples."""
    data = arrays()
    (x, y), offsets = (data.val, data.val_offsets) if held_out else ((data.x, data.y), data.offsets)
    return [(torch.tensor(x[a:b]), torch.tensor(y[a:b])) for a, b in zip(offsets, offsets[1:], strict=False)]


def descend(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    among: str | tuple[str, ...] = "",
    rate: float = LR,
    towards: State | None = None,
    pull: float = 0.0,
) -> None:
    """Gradient steps on the parameters whose name begins with `among`, with a proximal pull."""
    module.train()
    for _ in range(steps):
        named = {name: one for name, one in module.named_parameters() if name.startswith(among)}
        loss = functional.cross_entropy(module(x), y)
        for (name, one), gradient in zip(named.items(), torch.autograd.grad(loss, [*named.values()]), strict=True):
            one.data -= rate * (gradient + (pull * (one.data - towards[name]) if towards else 0))


def cohorts(done: fedmpi.Run) -> list[list[int]]:
    """The clients of each round."""
    found = []
    for record in done.records:
        ends = [part.partition("-")[::2] for part in record["clients"].split()]
        found.append([k for first, last in ends for k in range(int(first), int(last or first) + 1)])
    return found


def float_state(module: nn.Module) -> State:
    return {name: one.clone() for name, one in module.state_dict().items() if one.is_floating_point()}


def replayed(
    done: fedmpi.Run, personal: Callable[[str], bool], work: Callable[[nn.Module, Tensor, Tensor], None], uniform: bool
) -> tuple[State, dict[int, State]]:
    """Rounds of averaging what is not personal: the shared values, and the personal ones of each selected client."""
    initial, own = float_state(build(net, {}, None, done.config.seed)), dict[int, State]()
    shared, data = dict(initial), samples()
    for cohort in cohorts(done):
        ends = []
        for k in cohort:
            module = Net()
            module.load_state_dict({**shared, **own.get(k, {})}, strict=False)
            work(module, *data[k])
            end = float_state(module)
            own[k] = {name: one for name, one in end.items() if personal(name)}
            ends.append(end)
        weights = [1.0 if uniform else float(SIZES[k]) for k in cohort]
        for name in shared:
            if not personal(name):
                shared[name] = sum(w * end[name] for w, end in zip(weights, ends, strict=True)) / sum(weights)
    return shared, own


def assert_same(state: State, other: State) -> None:
    assert state.keys() == other.keys()
    for name, one in state.items():
        assert torch.allclose(one, other[name], rtol=0, atol=1e-10), name


def assert_scores(done: fedmpi.Run, models: dict[int, State]) -> None:
    """The last table has the scores of these models on the samples held out, and nothing of other clients."""
    last, held_out = done.clients["round"] == ROUNDS - 1, samples(held_out=True)
    table, scores = {name: column[last] for name, column in done.clients.items()}, []
    for k in range(len(SIZES)):
        if k not in models:
            assert table["times_used"][k] == 0
            assert np.isnan([table["personal_loss"][k], table["personal_accuracy"][k]]).all()
            continue
        module = Net().eval()
        module.load_state_dict(models[k], strict=False)
        outputs, y = module(held_out[k][0]).detach(), held_out[k][1]
        scores.append(float((outputs.argmax(1) == y).double().mean()))
        assert table["personal_loss"][k] == pytest.approx(float(functional.cross_entropy(outputs, y)), abs=1e-10)
        assert table["personal_accuracy"][k] == scores[-1]
    assert done.records[-1]["client_personal_accuracy_mean"] == pytest.approx(np.mean(scores))


@pytest.mark.parametrize(
    ("preset", "personal", "epochs"),
    [("fedper", ["head.*"], 2), ("fedper", ["h*d.weight", "BatchNorm*"], 1), ("fedbn", ["*bn.*"], 2)],
)
def test_personal_layers_stay_and_the_others_are_averaged(preset: str, personal: list[str], epochs: int) -> None:
    done = run(preset, local__personal=personal, local__epochs=epochs)
    kept = {"fedper": {1: ("head.weight", "bn."), 2: ("head.",)}, "fedbn": {2: ("bn.",)}}[preset][epochs]
    shared, own = replayed(
        done, lambda name: name.startswith(kept), lambda m, x, y: descend(m, x, y, epochs), preset == "fedbn"
    )
    assert_same(float_state(done.model), shared)
    assert_scores(done, {k: {**shared, **state} for k, state in own.items()})
    assert 0 < len(own) < len(SIZES)
    values = sum(one.numel() for name, one in shared.items() if not name.startswith(kept))
    assert [record["bytes_client_up"] for record in done.records] == [3 * 4 * values] * ROUNDS
    assert done.summary["personal_values"] == sum(map(torch.numel, shared.values())) - values


def test_personal_layers_in_the_batched_engine() -> None:
    """The batched engine agrees with the sequential one, and names a client whose training diverges."""
    settings = {"rounds": 3, "local.epochs": 2, "model.hidden": [6], "local.personal": ["dense1.bias", "output.*"]}
    runs = {
        engine: fedmpi.run("fedper", {**settings, "local.engine": engine}, data=arrays())
        for engine in ("batched", "sequential")
    }
    one, other = (float_state(done.model) for done in runs.values())
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    one, other = (done.clients["personal_loss"] for done in runs.values())
    assert one == pytest.approx(other, abs=1e-5)
    with pytest.raises(fedmpi.ClientFailure, match="Training diverged"):
        fedmpi.run("fedper", {**settings, "local.engine": "batched", "local.lr": 1e30}, data=arrays())


def test_fedrep_trains_the_head_and_then_the_representation() -> None:
    """Collins et al. 2021, Algorithm 1."""

    def work(module: nn.Module, x: Tensor, y: Tensor) -> None:
        descend(module, x, y, 3, "head")
        descend(module, x, y, 2, ("body", "bn"))

    options = {"local__algorithm__head_epochs": 3, "local__epochs": 2, "local__optimizer__momentum": 0.0}
    done = run("fedrep", local__personal=["head.*"], **options)
    shared, own = replayed(done, lambda name: name.startswith("head."), work, uniform=True)
    assert_same(float_state(done.model), shared)
    assert_scores(done, {k: {**shared, **state} for k, state in own.items()})
    assert {record["steps"] for record in done.records} == {3 * 5}


def test_ditto_keeps_a_whole_model_of_each_client() -> None:
    """Li et al. 2021, Algorithm 1: both solvers start from w_t, which the personal one is pulled to."""
    done, own, clients = run("ditto", local__epochs=2, local__algorithm__lam=0.7), dict[int, State](), samples()
    start = float_state(build(net, {}, None, 0))

    def work(module: nn.Module, x: Tensor, y: Tensor) -> None:
        k = next(k for k, (other, _) in enumerate(clients) if torch.equal(x, other))
        personal, received = Net(), float_state(module)
        personal.load_state_dict(own.get(k, start), strict=False)
        descend(personal, x, y, 2, towards=received, pull=0.7)
        own[k] = float_state(personal)
        descend(module, x, y, 2)

    shared, _ = replayed(done, lambda name: False, work, uniform=True)
    assert_same(float_state(done.model), shared)
    assert_scores(done, own)
    assert 0 < len(own) < len(SIZES)
    assert {record["steps"] for record in done.records} == {3 * 2}


@pytest.mark.parametrize("hessian", [False, True])
def test_per_fedavg_descends_on_the_loss_after_one_step(hessian: bool) -> None:
    """Fallah et al. 2020, Algorithm 1 with D'' = D; every client is evaluated after one step of rate α.

    Batch norm needs two samples, so halves of a batch of two or three overlap.
    """
    alpha = 0.3
    options = {"local__algorithm__alpha": alpha, "local__algorithm__hessian": hessian, "local__steps": 2}
    done = run("per-fedavg", **options)

    def work(module: nn.Module, x: Tensor, y: Tensor) -> None:
        module.train()
        first, second = slice(max(len(y) // 2, 2)), slice(min(len(y) // 2, len(y) - 2), None)
        values = [*module.parameters()]
        for _ in range(2):
            loss = functional.cross_entropy(module(x[first]), y[first])
            inner = torch.autograd.grad(loss, values, create_graph=True)
            before = [one.data.clone() for one in values]
            for one, gradient in zip(values, inner, strict=True):
                one.data = one.data - alpha * gradient.detach()
            outer = torch.autograd.grad(functional.cross_entropy(module(x[second]), y[second]), values)
            for one, held in zip(values, before, strict=True):
                one.data = held
            if hessian:
                products = torch.autograd.grad(inner, values, outer)
                outer = [one - alpha * product for one, product in zip(outer, products, strict=True)]
            for one, gradient in zip(values, outer, strict=True):
                one.data = one.data - LR * gradient

    shared, _ = replayed(done, lambda name: False, work, uniform=True)
    assert_same(float_state(done.model), shared)
    adapted = {}
    for k, (x, y) in enumerate(samples()):
        module = Net()
        module.load_state_dict(shared, strict=False)
        descend(module, x, y, 1, rate=alpha)
        adapted[k] = float_state(module)
    assert_scores(done, adapted)


class Twice(fedmpi.LocalAlgorithm):
    """Takes steps on the global model twice. They are without the proximal term of `local`."""

    def __init__(self, *, same: bool):
        self.same = same

    def train(self, client: Any, server: Any, steps: Any, generator: Any) -> None:
        once, again = steps(server.model, epochs=2), steps(server.model, epochs=2, proximal_mu=0.0)
        assert torch.equal(once, again) == self.same


@pytest.mark.parametrize("size", [3, "all"])
def test_every_call_of_steps_draws_other_batches(size: Any) -> None:
    settings = {"local__algorithm__same": size == "all", "local__batch_size": size, "local__drop_last": True}
    run(
        "fedavg", arrays((9, 14, 6, 20, 11, 8, 5)), rounds=1, local__algorithm=Twice, local__proximal_mu=0.5, **settings
    )


class Line(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


def line(description: object) -> nn.Module:
    return Line(2, 2).double()


def test_per_fedavg_uses_one_sample_twice_and_adapts_by_one_step() -> None:
    """With batches of one sample; the samples of a client are equal."""
    owner, point = np.repeat([0, 1], 3), np.array([[1, 2], [3, 1]], np.float32)
    data = ClientArrays(point[owner], owner, owner, test=(point, [0, 1]), val=(point, [0, 1], [0, 1]))
    settings = {
        "rounds": 1,
        "clients.sampler": "all",
        "evaluation.clients": "all",
        "local": {"steps": 1, "batch_size": 1, "lr": LR, "algorithm": {"name": "per-fedavg", "alpha": 0.3}},
        "server.weights": "uniform",
    }
    done = fedmpi.run("fedavg", settings, data=data, model=line)
    x, y, loss = torch.tensor(point).double(), torch.tensor([0, 1]), functional.cross_entropy
    start = build(line, {}, None, 0)

    def stepped(module: nn.Module, at: nn.Module, k: int, rate: float) -> nn.Module:
        """The module after a step with the gradient at another one."""
        found, gradients = deepcopy(module), torch.autograd.grad(loss(at(x)[k], y[k]), [*at.parameters()])
        for one, gradient in zip(found.parameters(), gradients, strict=True):
            one.data -= rate * gradient
        return found

    ends = [stepped(start, stepped(start, start, k, 0.3), k, LR) for k in range(2)]
    mean = {name: (one + ends[1].state_dict()[name]) / 2 for name, one in ends[0].state_dict().items()}
    assert_same(float_state(done.model), mean)
    start.load_state_dict(mean)
    assert done.clients["personal_loss"] == pytest.approx(
        [loss(stepped(start, start, k, 0.3)(x)[k], y[k]).item() for k in range(2)], abs=1e-10
    )


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_clients_choose_among_copies_of_the_model_by_their_losses(weights: str) -> None:
    """Ghosh et al. 2020, Algorithm 1, model averaging: the copies are those of a plain loop, and so are the choices."""
    data, held_out = samples(), samples(held_out=True)
    done = run("ifca", model__copies=3, local__epochs=2, server__weights=weights, evaluation__fine_tune=1)
    copies = [float_state(module) for module in build(net, {"copies": 3}, None, 0)]
    assert not torch.equal(copies[0]["body.weight"], copies[1]["body.weight"])

    def chosen(x: Tensor, y: Tensor) -> tuple[int, nn.Module]:
        modules = [Net().eval() for _ in copies]
        for module, state in zip(modules, copies, strict=True):
            module.load_state_dict(state, strict=False)
        losses = [float(functional.cross_entropy(module(x).detach(), y)) for module in modules]
        return int(np.argmin(losses)), modules[int(np.argmin(losses))]

    for cohort, record in zip(cohorts(done), done.records, strict=True):
        ends: list[list[tuple[float, State]]] = [[], [], []]
        for k in cohort:
            choice, module = chosen(*data[k])
            descend(module, *data[k], 2)
            ends[choice].append((1.0 if weights == "uniform" else SIZES[k], float_state(module)))
        assert record["copies"] == [len(found) for found in ends]
        for copy, found in enumerate(ends):
            total = sum(weight for weight, _ in found)
            if found:
                copies[copy] = {name: sum(w * end[name] for w, end in found) / total for name in copies[copy]}
    assert len({*done.clients["copy"]}) > 1
    for module, state in zip(done.model, copies, strict=True):
        assert_same(float_state(module), state)
    choices = [chosen(*own)[0] for own in data]
    assert done.clients["copy"][-len(SIZES) :].tolist() == choices
    assert_scores(done, {k: copies[choice] for k, choice in enumerate(choices)})
    for k, (x, y) in enumerate(held_out):
        tuned = chosen(*data[k])[1]
        descend(tuned, *data[k], 1)
        loss = float(functional.cross_entropy(tuned.eval()(x).detach(), y))
        assert done.clients["tuned_loss"][k - len(SIZES)] == pytest.approx(loss, abs=1e-10)
    size = sum(map(torch.numel, copies[0].values()))
    assert done.records[-1]["bytes_client_up"] == 3 * 4 * (size + 1)
    assert done.records[-1]["bytes_client_down"] == 3 * 4 * 3 * size
    outputs = torch.stack([module(held_out[0][0]) for module in done.model]).mean(0)
    assert torch.allclose(done.model(held_out[0][0]), outputs)


@pytest.mark.parametrize("optimizer", ["adam", {"name": "sgd", "weight_decay": 0.5}])
def test_a_copy_that_no_client_chooses_stays_as_it_is(optimizer: Any) -> None:
    """The preset has two copies of any network."""
    done = run("ifca", rounds=1, clients__count=1, local__optimizer=optimizer, local__proximal_mu=0.1)
    stayed = [
        all(torch.equal(one, start.state_dict()[name]) for name, one in float_state(end).items())
        for start, end in zip(build(net, {"copies": 2}, None, 0), done.model, strict=True)
    ]
    assert sorted(stayed) == [False, True]


@pytest.mark.parametrize("preset", ["per-fedavg", "ifca"])
def test_clients_that_cannot_train_have_no_personal_scores(preset: str) -> None:
    """Client 2 has no training sample, and batch norm cannot train on the one of client 4."""
    sizes = (9, 14, 0, 20, 1, 8, 5)
    done = run(preset, arrays(sizes), rounds=1, local__drop_last=True, evaluation__fine_tune=1)
    alone = [2, 4]
    assert np.flatnonzero(np.isnan(done.clients["personal_loss"])).tolist() == alone
    assert np.isfinite(done.clients["tuned_loss"]).all()
    if preset == "ifca":
        assert np.flatnonzero(done.clients["copy"] == -1).tolist() == alone


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"local__personal": ["output.*"]}, r"'output\.\*' matches no trainable .* body\.weight"),
        ({"local__personal": ["*"]}, "all trainable parameters"),
        ({"local__proximal_mu": 0.1, "local__optimizer": "adam"}, 'Set local.optimizer = "sgd"'),
        ({"local__algorithm": "fedrep", "local__personal": []}, "it trains a personal head: set local.personal"),
    ],
)
def test_what_does_not_go_with_personal_values_is_rejected(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run("fedper", **{"local__personal": ["head.*"], **changed})
