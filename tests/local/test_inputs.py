"""Samples of several arrays, and outputs with logits: bits as of one array, padding, ignored positions, errors."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import fedmpi
from fedmpi import ClientArrays, Run, UserError
from fedmpi.data.inputs import packed, trial_inputs
from fedmpi.models.inputs import adapted, unpacked

RNG = np.random.default_rng(41)
N, HELD = 90, 20
FLOATS, CUBES = RNG.standard_normal((N, 5)).astype(np.float32), RNG.standard_normal((N, 2, 3)).astype(np.float32)
IDS, KEPT = RNG.integers(-1, 40, (N, 6)), RNG.random((N, 6)) < 0.7
Y, OWNER = (FLOATS.sum(1) > 0).astype(int), np.arange(N - HELD) % 7
SETTINGS = {"rounds": 3, "clients.count": 4, "local.lr": 0.2, "evaluation.clients": "all", "cluster.threads": 1}
TRAIN, TEST = slice(HELD, N), slice(0, HELD)


def data(x: Any, y: Any = Y, **more: Any) -> ClientArrays:
    """The first samples are for testing; x is an array, a list, or a dict or tuple of them."""

    def part(rows: slice) -> Any:
        if isinstance(x, dict):
            return {name: values[rows] for name, values in x.items()}
        return tuple(values[rows] for values in x) if isinstance(x, tuple) else x[rows]

    return ClientArrays(part(TRAIN), y[TRAIN], OWNER, test=(part(TEST), y[TEST]), **more)


def run(model: Any, given: Any, more: dict[str, Any] | None = None, **others: Any) -> Run:
    return fedmpi.run("fedavg", SETTINGS | (more or {}), data=given, model=lambda description: model(), **others)


def outcome(done: Run) -> tuple[list[Any], dict[str, list[float]]]:
    """Records without times, and the values of the model."""
    records = [{k: v for k, v in record.items() if "seconds" not in k} for record in done.records]
    return records, {name: value.tolist() for name, value in done.model.state_dict().items()}


class Both(nn.Module):
    """A network of a vector and a cube."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 4), nn.Conv1d(2, 4, 3), nn.Linear(4, 2)

    def forward(self, vector: Tensor, cube: Tensor) -> Any:
        assert vector.shape[1:] == (5,) and cube.shape[1:] == (2, 3)
        return self.last(torch.relu(self.first(vector) + self.second(cube).squeeze(2)))


class Joined(Both):
    """The same network of one array."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x[:, :5].contiguous(), x[:, 5:].reshape(-1, 2, 3))


class Words(nn.Module):
    """Ids and a mask; outputs are a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last, self.drop = nn.Embedding(41, 8), nn.Linear(8, 2), nn.Dropout(0.3)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
        return {"logits": self.last(self.drop(self.table(ids + 1) * mask[..., None]).sum(1)), "loss": None}


BOTH = {"vector": FLOATS, "cube": CUBES}
WORDS = {"ids": IDS, "mask": KEPT}


def test_two_arrays_train_with_the_same_bits_as_one_that_the_model_splits() -> None:
    joined = np.concatenate([FLOATS, CUBES.reshape(N, 6)], axis=1)
    expected = outcome(run(Joined, data(joined), {"local.engine": "sequential"}))
    assert outcome(run(Both, data(BOTH))) == expected
    assert outcome(run(Both, data((FLOATS.astype(np.float64), torch.tensor(CUBES))))) == expected
    one_step = {"local.epochs": 1, "local.batch_size": "all"}
    expected = outcome(run(Joined, data(joined), one_step | {"local.engine": "sequential"}))
    assert outcome(run(Both, data(BOTH), one_step)) == expected


def test_packed_arrays_come_back_as_they_were() -> None:
    arrays = {"ids": IDS, "mask": KEPT, "cube": CUBES, "one": FLOATS[:, 0], "byte": (IDS[:, 0] + 1).astype(np.uint8)}
    words, inputs = packed("", {"x": arrays})
    found = unpacked(torch.from_numpy(words["x"]), inputs)
    assert list(found) == list(arrays) and [one.vocabulary for one in inputs] == [40, 0, 0, 0, IDS[:, 0].max() + 2]
    for name, tensor in found.items():
        assert np.array_equal(tensor.numpy(), arrays[name]) and tensor.is_contiguous()
        assert (
            tensor.dtype
            == {"i": torch.int64, "u": torch.int64, "b": torch.bool, "f": torch.float32}[arrays[name].dtype.kind]
        )


def test_arrays_are_found_by_name_and_described_by_all_parts() -> None:
    few = {"ids": np.zeros((9, 2), int), "type": np.zeros((9, 2), int), "x": FLOATS[:9]}
    more = {"x": FLOATS[:4], "type": few["type"][:4], "ids": np.full((4, 2), 7)}
    words, inputs = packed("", {"x": few, "test's x": more})
    assert [(one.name, one.vocabulary) for one in inputs] == [("ids", 8), ("type", 1), ("x", 0)]
    assert all(np.array_equal(unpacked(torch.from_numpy(words["test's x"]), inputs)[name], more[name]) for name in more)
    assert packed("", {"x": more, "test's x": few})[1][2].vocabulary == 8
    tried = trial_inputs(SimpleNamespace(inputs=inputs), 5, np.random.default_rng(0))  # type: ignore[arg-type]
    assert not unpacked(torch.from_numpy(tried), inputs)["type"].any()
    words, inputs = packed("", {"x": tuple(np.full((3, 1), place) for place in range(12))})

    class Last(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return torch.cat(x, dim=1)

    assert adapted(Last(), inputs)(torch.from_numpy(words["x"]))[0].tolist() == list(range(12))


def test_a_run_on_shards_that_is_resumed_gives_the_same_bits(tmp_path: Path, caplog: Any) -> None:
    arrays = data(WORDS)
    with caplog.at_level(logging.INFO):
        expected = outcome(run(Words, arrays))
    assert "sequential (samples of several arrays" in caplog.text
    shards = arrays.save(tmp_path / "shards", shards=3)
    out = tmp_path / "run"
    assert run(Words, shards, out=out, on_round=lambda record: None, stop=lambda: True).ending == "stopped"
    done = run(Words, shards, out=out, resume=True)
    assert outcome(done) == expected and type(done.model) is Words
    assert "ids: 6 int64, mask: 6 bool" in dict(fedmpi.data.opening.open_store(shards).manifest.facts())["sample"]


def test_logits_of_an_object_or_a_dict_are_the_outputs() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Any:
            return self.last(x)

    class Named(Plain):
        def forward(self, x: Tensor) -> Any:
            return {"logits": self.last(x)}

    class Held(Plain):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.last(x))

    expected = outcome(run(Plain, data(FLOATS), {"local.engine": "sequential"}))
    assert outcome(run(Named, data(FLOATS))) == outcome(run(Held, data(FLOATS))) == expected

    class Own(fedmpi.LocalAlgorithm):
        def objective(self, module: Any, x: Any, y: Any, client: Any, server: Any, generator: Any) -> Any:
            return functional.cross_entropy(module(x), y)

    assert outcome(run(Both, data(BOTH), {"local.algorithm": Own})) == outcome(run(Both, data(BOTH)))
    network = Held()
    assert fedmpi.run("fedavg", SETTINGS | {"rounds": 1}, data=data(FLOATS), model=network).model is not network
    assert type(network) is Held, "the user's module is left as it is"


LINES = [IDS[row, : 1 + row % 6] + 1 for row in range(N)]


def test_sequences_of_unequal_length_are_padded_and_masked() -> None:
    known = np.arange(6) < 1 + np.arange(N)[:, None] % 6
    whole = np.where(known, IDS + 1, 0)
    assert data(LINES).digest == data((whole, known)).digest
    assert data([line.tolist() for line in LINES]).digest == data((whole, known)).digest
    assert data({"ids": LINES, "b": LINES}).digest == data({"ids": whole, "b": whole, "attention_mask": known}).digest
    short, whole_of = [line[:2] for line in LINES[HELD:]], {"ids": LINES[:HELD]}
    longer = ClientArrays({"ids": short}, short, OWNER, test=(whole_of, LINES[:HELD]), targets="tokens")
    same = ClientArrays({"ids": [line[:1] for line in short]}, Y[TRAIN], OWNER, test=(whole_of, Y[TEST]))
    assert [longer.inputs[0].shape, longer.y.shape[1:], same.inputs[0].shape] == [(6,)] * 3
    assert (longer.y[:, 2:] == -1).all() and not same.x[:, 1:6].any()
    own = {"ids": LINES, "attention_mask": [np.ones(len(line), int) for line in LINES]}
    assert data(own).digest == data({"ids": whole, "attention_mask": known.astype(int)}).digest
    series = [RNG.standard_normal((len(line), 2)) for line in LINES]
    assert [one.shape for one in data(series).inputs] == [(6, 2), (6,)]
    targets = [np.arange(len(line)) for line in LINES]
    rows = np.fromiter([*IDS.tolist(), None], object)[:-1]  # a column of pandas, with lists of one length
    assert data({"ids": rows}).digest == data({"ids": IDS}).digest
    found = data({"ids": LINES}, y=targets)
    assert found.targets == "tokens"
    assert np.array_equal(found.test[1], np.where(known, np.arange(6), -1)[TEST])


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(41, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.last(self.table(ids)))


def test_ignored_positions_are_left_out_of_loss_gradient_and_accuracy() -> None:
    """Two clients take one step each; the loop goes over the samples and their kept positions one by one."""
    ids, y = RNG.integers(0, 41, (12, 4)), RNG.integers(0, 3, (12, 4))
    y[0], y[1, 2:], y[5, :3], y[9] = -100, -100, -100, -1
    owner = np.array([0] * 5 + [1] * 3)
    made = ClientArrays({"ids": ids[:8]}, y[:8], owner, test=({"ids": ids[8:]}, y[8:]), classes=3)
    settings = SETTINGS | {"rounds": 1, "clients.count": 2, "local.batch_size": "all", "task.kind": "tokens"}
    network = Tagger()
    done = fedmpi.run("fedavg", settings | {"local.epochs": 1}, data=made, model=network)

    def loss(module: nn.Module, rows: Any) -> tuple[Tensor, list[bool]]:
        each, right = [], []
        for row in rows:
            logits = module(torch.tensor(ids[row])).logits
            kept = [place for place in range(4) if y[row, place] >= 0]
            nll = [-functional.log_softmax(logits[place], 0)[y[row, place]] for place in kept]
            each.append(sum(nll) / len(kept) if kept else torch.zeros(()))
            right += [bool(logits[place].argmax() == y[row, place]) for place in kept]
        return sum(each) / len(rows), right  # type: ignore[return-value]

    expected = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    for client, share in ((0, 5 / 8), (1, 3 / 8)):
        gradients = torch.autograd.grad(loss(network, np.flatnonzero(owner == client))[0], [*network.parameters()])
        for (name, value), gradient in zip(network.named_parameters(), gradients, strict=True):
            expected[name] += share * (value.detach() - 0.2 * gradient)
    for name, value in done.model.named_parameters():
        assert torch.allclose(value, expected[name], atol=1e-6)
    tested, right = loss(done.model, range(8, 12))
    assert done.records[0]["test_loss"] == pytest.approx(tested.item(), rel=1e-5)
    assert done.records[0]["test_accuracy"] == pytest.approx(np.mean(right)) and len(right) < 16
    for client, found in enumerate(done.clients["accuracy"]):
        assert found == pytest.approx(np.mean(loss(done.model, np.flatnonzero(owner == client))[1]))


class Records(Dataset[Any]):
    def __init__(self, rows: slice):
        self.rows = range(N)[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        row = self.rows[place]
        return {"ids": torch.tensor(LINES[row]), "label": torch.tensor(Y[row]), "writer": f"w{row % 7}"}


def test_datasets_are_read_by_column_or_place() -> None:
    def tuples(rows: slice, *arrays: np.ndarray) -> TensorDataset:
        return TensorDataset(*(torch.tensor(one[rows]) for one in arrays))

    of = ClientArrays.from_datasets
    pair = of(tuples(TRAIN, FLOATS, Y), OWNER, test=tuples(TEST, FLOATS, Y))
    assert pair.digest == data(FLOATS).digest and pair.description.task == "vector"
    more = of(tuples(TRAIN, IDS, KEPT, Y), OWNER, test=tuples(TEST, IDS, KEPT, Y), val=tuples(TEST, IDS, KEPT, Y))
    assert more.digest == data((IDS, KEPT), val=((IDS[TEST], KEPT[TEST]), Y[TEST])).digest
    found = of(Records(TRAIN), "writer", test=Records(TEST), val=Records(TEST), inputs=["ids"], name="letters")

    class Pairs(TensorDataset):  # with attributes of its own, as many have
        def __init__(self, rows: slice, named: bool):
            self.features, self.named = torch.tensor(IDS[rows]), named
            super().__init__(self.features, torch.tensor(KEPT[rows]), torch.tensor(Y[rows]))

        def __getitem__(self, place: int) -> Any:
            *x, y = super().__getitem__(place)
            return dict(zip(("ids", "mask"), x, strict=True)) if self.named else tuple(x), y

    for named, x in ((False, (IDS, KEPT)), (True, {"ids": IDS, "mask": KEPT})):
        assert of(Pairs(TRAIN, named), OWNER, test=Pairs(TEST, named)).digest == data(x).digest
    names = np.array([f"w{row % 7}" for row in range(N)])
    lines = {"ids": LINES[TEST]}
    again = ClientArrays(
        {"ids": LINES[TRAIN]},
        Y[TRAIN],
        names[TRAIN],
        test=(lines, Y[TEST]),
        val=(lines, Y[TEST], names[TEST]),
        name="letters",
    )
    assert found.digest == again.digest and found.val_offsets is not None
    for words, (train, more_words) in {
        "train has no column 'client', but ids, label, writer": (Records(TRAIN), {"owner": "client"}),
        "test has no column 'ids', but 0, 1": (Records(TRAIN), {"test": tuples(TEST, IDS, Y)}),
        "train is a dict. Give a dataset": ({"train": Records(TRAIN)}, {}),
        "x['writer'] is <U2 (70,); each sample needs numbers": (Records(TRAIN), {}),
    }.items():
        with pytest.raises(UserError, match=re.escape(words)):
            of(train, **{"owner": OWNER, "test": Records(TEST)} | more_words)


def test_splits_of_datasets_are_data() -> None:
    """With a column of clients, or assigned to clients as the digits are."""

    class Kept(Records):
        def __getitem__(self, place: int) -> dict[str, Any]:
            row = self.rows[place]
            return {"x": FLOATS[row], "label": int(Y[row]), "user": row % 7}

    splits = {"train": Kept(TRAIN), "test": Kept(TEST), "validation": Kept(TEST)}
    by_hand = ClientArrays.from_datasets(splits["train"], "user", test=splits["test"], val=splits["validation"])
    assert outcome(run(lambda: nn.Linear(5, 2), splits)) == outcome(run(lambda: nn.Linear(5, 2), by_hand))
    with pytest.raises(UserError, match="test is a NoneType. Give a dataset"):
        run(Both, {"train": Kept(TRAIN)})
    vectors = TensorDataset(torch.tensor(FLOATS), torch.tensor(Y))
    for partition, more in {"dirichlet": {}, "iid": {"data.source.partition": "iid", "data.source.clients": 9}}.items():
        more = more | {"rounds": 1}
        sizes = run(lambda: nn.Linear(5, 2), {"train": vectors, "test": vectors}, more).clients["samples"]
        assert (len(sizes), sum(sizes)) == ({"dirichlet": 20, "iid": 9}[partition], N)
        assert (np.ptp(sizes) == 0) == (partition == "iid")
    numbers = TensorDataset(torch.tensor(FLOATS), torch.tensor(FLOATS[:, 0]))
    with pytest.raises(UserError, match='Set data.source.partition = "iid"'):
        run(lambda: nn.Linear(5, 1), {"train": numbers, "test": numbers}, {"task.kind": "regression"})


OTHER = {"vector": FLOATS[TEST]}
MORE = {"vector": FLOATS[TEST], "cube": CUBES[TEST], "more": FLOATS[TEST]}
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "test's x has the arrays vector, but x has vector, cube": (BOTH, {"test": (OTHER, Y[TEST])}),
    "x has 70 samples, but 69 in b": ({"a": FLOATS, "b": FLOATS[:-1]}, {}),
    "x['a'] is float32 (70, 5) and holds numbers that are not finite": ({"a": FLOATS * np.nan}, {}),
    "x['a'] is float64 (70, 5) and holds numbers that are not finite": ({"a": FLOATS.astype(float) * 1e300}, {}),
    "test's x has the arrays vector, cube, more, but x has": (BOTH, {"test": (MORE, Y[TEST])}),
    "x[0] is int64 (70, 6) and holds whole numbers beyond 32 bits": ((IDS + 2**40,), {}),
    "mean has no effect on samples of several arrays": (BOTH, {"mean": 0.5}),
    "task has no effect on samples of several arrays": (BOTH, {"task": "text"}),
    "test's x holds no value": (BOTH, {"test": ({name: one[:0] for name, one in BOTH.items()}, Y[:0])}),
    "b and ids of x differ in length": ({"ids": LINES, "b": LINES[1:] + LINES[:1]}, {}),
    "test's x[0] has int64 (6,) per sample where that of x has float32 (5,)": (
        (FLOATS,),
        {"test": ((IDS[TEST],), Y[TEST])},
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_arrays_that_do_not_match_are_rejected(words: str) -> None:
    x, more = WRONG[words]
    if "test" in more:
        rows = {name: one[TRAIN] for name, one in x.items()} if isinstance(x, dict) else tuple(one[TRAIN] for one in x)
        with pytest.raises(UserError, match=rf"^ClientArrays: {re.escape(words)}"):
            ClientArrays(rows, Y[TRAIN], OWNER, **more)
        return
    with pytest.raises(UserError, match=rf"^ClientArrays: {re.escape(words)}"):
        data(x, **more)


def test_what_needs_one_array_is_rejected() -> None:
    arrays = data(BOTH)
    with pytest.raises(UserError, match="takes one array per sample, but the data have several"):
        fedmpi.run("fedavg", SETTINGS | {"model": "mlp"}, data=arrays)
    with pytest.raises(UserError, match=r'"batched" is not possible here: samples of several arrays'):
        run(Both, arrays, {"local.engine": "batched"})
    with pytest.raises(UserError, match=r"rebalance\.mode needs images|images"):
        run(Both, arrays, {"rebalance.mode": "virtual"})
    with pytest.raises(UserError, match="from_datasets"):
        run(Both, Records(TRAIN))


def test_format_and_transform_of_hugging_face_apply() -> None:
    datasets = pytest.importorskip("datasets", reason="optional: needs datasets")
    rows = {"ids": IDS.tolist(), "text": ["a"] * N, "label": Y.tolist(), "user": list(range(N))}
    whole = datasets.Dataset.from_dict(rows)
    form = whole.with_format("torch", columns=["ids", "label", "user"])
    changed = whole.with_transform(
        lambda batch: (
            {"ids": [np.array(one) + 1 for one in batch["ids"]]} | {name: batch[name] for name in ("label", "user")}
        )
    )
    for dataset, more in ((form, 0), (changed, 1)):
        made = ClientArrays.from_datasets(dataset, "user", test=dataset, task="vector")
        assert np.array_equal(made.x, IDS + more)


PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "several-inputs.md").read_text(encoding="utf-8")


def test_the_example_of_hugging_face_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="optional: needs transformers and datasets")
    pytest.importorskip("datasets", reason="optional: needs transformers and datasets")
    found: dict[str, Any] = {}
    exec(re.findall(r"```python skip\n(.*?)```", PAGE, re.DOTALL)[0], found)
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0.8
    names = [name for name, _ in found["run"].model.named_parameters() if "lora" in name]
    assert len(names) == 16 and type(found["run"].model).__name__ == "BertForSequenceClassification"
