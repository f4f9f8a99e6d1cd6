"""LoRA: only small matrices are trained, sent and counted; every other value stays bit-identical."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import UserError
from fedmpi.data.schema import DataDescription
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.models.lora import LoraLinear, with_lora
from tests.tasks import worlds
from tests.tasks.worlds import BASE

RANK, ALPHA = 2, 6.0
OPTIONS = {"rank": RANK, "alpha": ALPHA, "targets": ()}
HIDDEN = {"rank": RANK, "alpha": ALPHA, "targets": ("[12]",)}
LANGUAGE = {**BASE, "task.kind": "tokens", "local.lr": 0.3}


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def net(description: object = None) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False))


def language(description: DataDescription) -> nn.Module:
    """Predict the next token from the last one."""
    words, classes = nn.Embedding(description.vocabulary, 12), nn.Linear(16, description.classes)
    return nn.Sequential(words, nn.Linear(12, 16), nn.Linear(16, 16), nn.GELU(), classes)


def test_the_model_is_at_first_as_it_was_and_then_w_plus_the_product() -> None:
    plain, small, x = net(), with_lora(net(), OPTIONS), torch.randn(5, 4)
    assert torch.equal(plain(x), small(x))
    layer = small[0]
    with torch.no_grad():
        layer.lora_b.normal_()
        merged = plain[0].weight + ALPHA / RANK * layer.lora_b @ layer.lora_a
        assert torch.allclose(layer(x), nn.functional.linear(x, merged, plain[0].bias), atol=1e-6)
    assert list(net().state_dict()) == [name for name in small.state_dict() if "lora" not in name]
    trained = [name for name, value in small.named_parameters() if value.requires_grad]
    assert trained == ["0.lora_a", "0.lora_b", "2.lora_a", "2.lora_b"]
    assert FlatModel(small).size == RANK * (4 + 6 + 6 + 3)


@pytest.mark.parametrize(
    ("targets", "chosen"), [(("0",), ["0"]), (("?",), ["0", "2"]), (("2", "0"), ["0", "2"]), ((), ["0", "2"])]
)
def test_targets_are_names_or_patterns(targets: tuple[str, ...], chosen: list[str]) -> None:
    small = with_lora(net(), {**OPTIONS, "targets": targets})
    assert [name for name, part in small.named_modules() if isinstance(part, LoraLinear)] == chosen


@pytest.mark.parametrize(
    ("module", "targets", "words"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 3)), (), "the model has none"),
        (net(), ("query",), "no Linear layer is named 'query'. Choose among 0, 2"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (), "batch norm"),
    ],
)
def test_models_that_it_does_not_suit_are_rejected(module: nn.Module, targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        with_lora(module, {**OPTIONS, "targets": targets})


def test_bytes_are_those_of_the_small_matrices_and_the_rest_stays_bit_identical() -> None:
    arrays = worlds.tokens()
    done = fedmpi.run("fedavg", {**LANGUAGE, "model.lora": HIDDEN}, data=arrays, model=language)
    torch.rand(3)  # matrices do not depend on the global generator
    start = build(language, {"lora": HIDDEN}, arrays.description, seed=0)
    small = RANK * (12 + 16 + 16 + 16)
    assert done.summary["parameters"] == small
    for record in done.records:
        assert record["bytes_client_up"] == record["bytes_client_down"] == 4 * small * worlds.CLIENTS
    pairs = zip(start.state_dict().items(), done.model.state_dict().values(), strict=True)
    moved = {name.rpartition(".")[2] for (name, before), after in pairs if not torch.equal(before, after)}
    assert moved == {"lora_a", "lora_b"}
    assert done.records[-1]["train_loss"] < done.records[0]["train_loss"]


def test_a_run_does_not_continue_with_other_frozen_values(tmp_path: Path) -> None:
    settings = {**BASE, "task.kind": "regression", "model.lora": {"rank": 1, "alpha": 1.0}, "local.lr": 0.01}
    data = worlds.three_numbers()
    for times in (1.0, 1.0, 2.0):
        OFTEN[0] = times
        if times == 1.0:
            settings["rounds"] += 1
            fedmpi.run("fedavg", settings, data=data, model=scaled, out=tmp_path / "RUN", resume=True)
    with pytest.raises(UserError, match="frozen parameters differ from those"):
        fedmpi.run("fedavg", {**settings, "rounds": 9}, data=data, model=scaled, out=tmp_path / "RUN", resume=True)


OFTEN = [1.0]


def scaled(description: object) -> nn.Module:
    """A model made of something else than its options."""
    module = nn.Linear(5, 3)
    with torch.no_grad():
        module.weight.fill_(OFTEN[0])
    return module


def test_torchs_own_encoder_is_evaluated_with_its_matrices() -> None:
    """Network whose fast path in evaluation would read the weights of Linear layers and skip the matrices."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    small, x = with_lora(nn.TransformerEncoder(layer, 2), OPTIONS), torch.randn(3, 5, 8)
    for name, value in small.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(value)
    for hidden in (None, torch.arange(5) >= torch.tensor([[5], [3], [2]])):
        shown = torch.ones(3, 5, dtype=torch.bool) if hidden is None else ~hidden
        expected = small.train()(x, src_key_padding_mask=hidden)
        with torch.inference_mode():
            found = small.eval()(x, src_key_padding_mask=hidden)
        assert torch.allclose(found[shown], expected[shown], atol=1e-5)


def test_the_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, "docs/reference/models.md", "exec"), {"__name__": "page"})
    assert int(capsys.readouterr().out) == 4800
