"""Traits of a model's forward pass, found by a few passes of trial samples before the first round: whether it reads
the data and returns the outputs that the task needs, whether samples of a batch influence one another, how large its
layers are.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.arithmetic import full_precision
from fedmpi.common.calling import drawn_from, failure_of, generator_states, kept_generators
from fedmpi.common.errors import ComponentFailure, UserError, raised
from fedmpi.common.streams import Streams
from fedmpi.data.inputs import trial_inputs
from fedmpi.data.schema import DataDescription
from fedmpi.models.flat import FlatModel
from fedmpi.models.inputs import logits_of
from fedmpi.models.layers import no_masks
from fedmpi.tasks.evaluation import rows_per_pass
from fedmpi.tasks.losses import couples_samples

TRIAL_ROWS = 4
PASS_BYTES = 8 << 20
"""Most bytes of a model's widest layer in one pass on a CPU. Larger outputs leave the caches, and from 32 MiB on the C
library requests new pages from the operating system; a sample of a CNN then takes up to twice as long."""
LEAST_ROWS = 32
"""Samples per pass below which the overhead of calls dominates."""


@dataclass(frozen=True)
class ForwardTraits:
    """Facts about a model and its loss that training and evaluation with joined batches need."""

    # A sample's outputs depend on the other samples of its batch (batch norm …), or are drawn; in training mode
    couples: bool
    couples_evaluated: bool = False  # the same in evaluation mode
    keeps: bool = False  # a forward pass changes parameters, buffers or attributes, or draws random numbers
    loss_couples: bool = False  # a sample's loss depends on the other samples of its batch, or is drawn
    bytes_widest: int = 0  # a sample's share of the largest tensor that is kept until its gradient is known
    least: int = 1  # fewest samples of a training batch: 2 if a single one fails (batch norm, squeeze())


_known: WeakKeyDictionary[FlatModel, ForwardTraits] = WeakKeyDictionary()


def forward_traits(model: FlatModel, description: DataDescription) -> ForwardTraits:
    """Return the traits of a model from one trial on a few trial samples; its values and all generators stay unchanged.

    The model is then bound to a scratch copy of its initial values.
    """
    if model not in _known:
        _known[model] = traits = _tried(model, description)
        model.least = traits.least
    return _known[model]


def _tried(model: FlatModel, description: DataDescription) -> ForwardTraits:
    x = trial_samples(description, TRIAL_ROWS, model.initial)
    with kept_generators(), full_precision(), model.masks.given_by(no_masks), _named(model, description):
        couples, couples_evaluated = (_couples(model, x, description, training) for training in (True, False))
        outputs = _outputs(model, x, description)
        if not outputs.requires_grad:
            raise UserError(
                "the model's outputs have no gradient with respect to its parameters (detach, no_grad or NumPy?), so "
                "it cannot be trained"
            )
        keeps = _keeps(model, x)
        try:
            least = 1 + bool(_outputs(model, x[:1], description).isnan().any())
        except Exception:  # batch norm: "Expected more than 1 value per channel when training"
            least = 2
        loss_couples = couples_samples(model.loss, outputs.detach(), description)
        widest = _bytes_widest(model, x)
        return ForwardTraits(couples, couples_evaluated, keeps, loss_couples, widest, least)


@contextmanager
def _named(model: FlatModel, description: DataDescription) -> Iterator[None]:
    """Name passes of trial samples that fail, with the line of code if the model is custom."""
    try:
        yield
    except (UserError, ComponentFailure, KeyboardInterrupt):
        raise
    except BaseException as error:  # a sys.exit() in a model must not end the run as if it were done
        shape = f"{description.task} samples of shape {tuple(description.feature_shape)}"
        samples = f"samples of {description.sample}" if description.inputs else shape
        problem = f"cannot read {samples} (synthetic, before the first round): {raised(error)}"
        if model.part is None:
            raise UserError(f"the model {problem}") from error
        raise failure_of(model.part, error, f"it {problem}") from error


def _fresh(model: FlatModel, training: bool = True) -> None:
    model.begin(model.initial.clone())
    model.module.train(training)


def _outputs(model: FlatModel, x: Tensor, description: DataDescription, training: bool = True) -> Tensor:
    """Return the checked outputs of a fresh module; check that its input is unchanged."""
    _fresh(model, training)
    given = x.clone()
    with torch.set_grad_enabled(training), model.seeded(Streams(0), 0, 0):
        outputs = model.module(given)
        if not model.adapts and not isinstance(outputs, Tensor) and isinstance(logits_of(outputs), Tensor):
            model.adapts = True
            return _outputs(model, x, description, training)
    if len([one for one in model.module.parameters() if one.requires_grad]) != len(model.parameters):
        raise UserError(
            "the model's forward pass makes or freezes parameters, which would not be trained. Make them, or freeze "
            "them, when the model is built"
        )
    if not torch.equal(given, x):
        raise UserError(
            "the model changes its input in place, as x /= 2 or a first layer with inplace=True do, which would "
            "spoil the samples for later rounds. Write x = x / 2, or clone x first"
        )
    mode = "training mode" if training else "evaluation mode"
    found = f"{outputs.dtype} {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    fits = isinstance(outputs, Tensor) and description.takes_outputs(tuple(outputs.shape), len(x))
    if not fits or not outputs.is_floating_point() or outputs.device != x.device:
        wanted = ", ".join(map(str, ("samples", *description.output_shape)))
        raise UserError(
            f"the model must return one tensor of real numbers of shape ({wanted}) on {x.device} for "
            f"{description.targets}, but in {mode} it returned {found} for a batch of {len(x)}. Return the logits or "
            "predictions alone"
        )
    return outputs  # type: ignore[no-any-return]


def _couples(model: FlatModel, x: Tensor, description: DataDescription, training: bool) -> bool:
    """Check whether the outputs of a batch differ from those of its halves, or dropout is not of its samples."""
    dropped: list[tuple[int, int, float]] = []  # masks of the rows that dropout sees

    def noted(rows: int, units: int, p: float) -> Tensor:
        dropped.append((rows, units, p))
        return no_masks(rows, units, p)

    with model.masks.given_by(noted):
        whole = _outputs(model, x, description, training)
    if training:
        model.sent.requests = [(rows * units / len(x), p) for rows, units, p in dropped]
    if {rows for rows, *_ in dropped} - {len(x)}:
        return True
    halves = torch.cat([_outputs(model, half, description, training) for half in x.chunk(2)])
    return not torch.allclose(whole, halves, rtol=1e-3, atol=1e-5, equal_nan=True)


def _keeps(model: FlatModel, x: Tensor) -> bool:
    """Check whether a pass in training mode changes the module or draws from a global generator."""
    _fresh(model)
    before, generators = _state(model), generator_states()
    model.module(x.clone())
    model.collect()
    return bool(drawn_from(generators)) or _state(model) != before


def _state(model: FlatModel) -> list[bytes]:
    """Return a module's contents as bytes; an attribute without such a form (a lambda) is given by its identity."""
    module, torchs_own = model.module, {"_parameters", "_buffers", "_modules"}
    tensors = (one for one in (*module.parameters(), *module.buffers()) if one.layout is torch.strided)
    state = [one.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors]
    for part in () if model.plain else module.modules():
        for name, value in vars(part).items():
            if name in torchs_own:
                continue
            try:
                state.append(name.encode() + pickle.dumps(value))
            except Exception:  # whatever pickling a user's attribute raises
                state.append(f"{name} {id(value)}".encode())
    return state


def _bytes_widest(model: FlatModel, x: Tensor) -> int:
    """Return the bytes per sample of the largest tensor that a forward pass keeps for the backward pass.

    Only tensors that grow with the samples count, not weights, frozen ones or tensors computed from others.
    """
    whole, part = (_bytes_saved(model, x[:count].clone()) for count in (len(x), len(x) // 2))
    if len(whole) != len(part):
        return max(whole, default=0) // len(x)
    return max((max(0, one - other) * 2 // len(x) for one, other in zip(whole, part, strict=True)), default=0)


def _bytes_saved(model: FlatModel, x: Tensor) -> list[int]:
    """Return the bytes of every piece of memory that a forward pass keeps for the backward pass, in order."""
    held: dict[int, torch.UntypedStorage] = {}  # kept so that no other storage reuses an address

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor.detach()  # keeping a tensor with its graph would keep the graph alive for ever

    _fresh(model)
    with suppress(RuntimeError), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.module(x)  # torch.func.grad within a pass allows no such hooks
    return [storage.nbytes() for storage in held.values()]


def rows_of_a_pass(model: FlatModel, description: DataDescription, most: int, training: bool = False) -> int:
    """Return how many samples to pass through a model at once.

    The result is `most`, or fewer if samples have very many outputs, or if on a CPU the widest layer would exceed
    `PASS_BYTES`. Samples that influence one another are not separated for that.
    """
    rows = rows_per_pass(description, most)
    if model.device.type != "cpu":
        return rows
    traits = forward_traits(model, description)
    fewer = min(rows, max(LEAST_ROWS, PASS_BYTES // max(1, traits.bytes_widest)))
    coupled = traits.couples if training else traits.couples_evaluated
    return rows if coupled or traits.loss_couples else fewer


def couples_in_evaluation(model: FlatModel, description: DataDescription) -> bool:
    """Check whether a sample's loss in evaluation mode depends on the other samples of the same pass."""
    traits = forward_traits(model, description)
    return traits.couples_evaluated or traits.loss_couples


def trial_samples(description: DataDescription, rows: int, like: Tensor) -> Tensor:
    """Return synthetic samples (rows, …) on the device and of the type of a parameter.

    Numbers are positive, as some models need them. Texts resemble real ones: from the second one on they end with
    padding (0), and half of the other tokens are among the first few ids, which often have a special meaning.
    """
    generator = np.random.Generator(np.random.Philox(rows))
    shape = (rows, *description.feature_shape)
    if description.inputs:
        return torch.from_numpy(trial_inputs(description, rows, generator)).to(like.device)
    if description.task != "text":
        return torch.from_numpy(generator.standard_normal(shape)).sigmoid().to(device=like.device, dtype=like.dtype)
    words = max(description.vocabulary, 1)
    few = np.array([0, 1, 2, 3, words - 1], np.int32) % words
    tokens = generator.integers(0, words, shape, dtype=np.int32)
    tokens = np.where(generator.random(shape) < 0.5, few[generator.integers(0, len(few), shape)], tokens)
    tokens[..., 0] = generator.integers(min(1, words - 1), words, shape[:-1])
    for row in range(1, rows):
        tokens[row, ..., max(1, tokens.shape[-1] // (row + 1)) :] = 0
    return torch.from_numpy(tokens).to(like.device)
