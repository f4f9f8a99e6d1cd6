"""What a model's forward pass and the loss do beside computing, found out by trying them: draw from global
generators, let the samples of a batch influence one another, or cannot read the data at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.arithmetic import full_precision
from fedmpi.common.calling import failure_of
from fedmpi.common.errors import PartFailure, UserError, raised
from fedmpi.common.generators import drawn_from, drawn_from_held, generator_states, held_states, kept_generators
from fedmpi.data.schema import DataDescription
from fedmpi.local.gradient_traits import bends_gradients, check_gradient
from fedmpi.models.dropout import ClientMasks, NoMasks
from fedmpi.models.dropout_calls import gradients_within
from fedmpi.models.flat import FlatModel, Precision
from fedmpi.models.written import Written
from fedmpi.tasks.evaluation import rows_per_pass
from fedmpi.tasks.losses import LossTraits, loss_traits

TRIAL_ROWS, MANY_ROWS = 4, 67
PASS_BYTES = 8 << 20
"""Of a model's widest layer in one pass on a processor. Beyond, outputs leave the caches, and from 32 MiB on the C
library takes them from the system anew, page by page: evaluating a CNN on 3 × 32 × 32 images (128 KiB a sample) took
1,442 µs a sample in passes of 2,000, 897 of 500, 657 of 250 and 670 of 64, gradients of it 2,877 in passes of 1,024,
1,756 of 512, 1,674 of 128 and 1,644 of 64."""
LEAST_ROWS = 32
"""Samples of a pass below which it is calls that take the time."""


@dataclass(frozen=True)
class ForwardTraits:
    """What training with merged batches must know about a model and its loss."""

    # The forward pass draws from a global generator of torch, numpy or random (rrelu, dropout in evaluation mode …), or
    # from one that the model holds
    draws: bool
    # A sample's logits depend on the other samples of the batch (batch norm …), or on what the passes before have left;
    # means nothing where the model draws
    couples: bool
    loss: LossTraits = LossTraits()  # The same of the loss
    # What the forward pass keeps of a sample until its gradient is known, all together and the largest piece
    bytes_kept: int = 0
    bytes_widest: int = 0
    calls_dropout: bool = False  # The forward pass calls functions that drop values (`models.dropout_calls`)
    # Some values that dropout sees do not have the samples, in their order, as their first axis: which mask a sample
    # gets depends on the others of the batch
    drops_across: bool = False
    torch_drops: bool = False  # Masks are left to torch's generator; see `models.dropout.Masks`
    drops: bool = False  # The forward pass drops values, whether in a layer or in a function
    # The forward pass changes parameters in place, or gives them other values (`self.fc.weight.data = …`)
    writes: bool = False
    # The gradient of several samples is not the sum of theirs, or not in proportion to the weights of their losses:
    # hooks, or a backward pass of somebody's own, clip or normalise it. Not looked at where merging is ruled out
    bends: bool = False
    # Samples that a batch has at the least in training mode: 2 where one alone fails (batch norm, squeeze())
    least: int = 1

    @property
    def seeded(self) -> bool:
        """Whether all global generators must be seeded for every client."""
        return self.draws or self.loss.draws


_known: WeakKeyDictionary[FlatModel, ForwardTraits] = WeakKeyDictionary()


def forward_traits(model: FlatModel, description: DataDescription) -> ForwardTraits:
    """The traits of a model, tried once on a few made-up samples; neither its values nor any generator change.

    The model is then bound to a scratch copy of its initial values.
    """
    if model not in _known:
        adopt_traits(model, _try_out(model, description))
    return _known[model]


def known_traits(model: FlatModel) -> ForwardTraits:
    """The traits of a model that was tried."""
    return _known[model]


def adopt_traits(model: FlatModel, traits: ForwardTraits) -> None:
    """Take these for the model's traits from now on: what another rank found counts as well."""
    _known[model] = traits
    model.drops, model.calls_dropout, model.masks.from_torch = traits.drops, traits.calls_dropout, traits.torch_drops
    model.writes, model.least = traits.writes, traits.least


def check_type(model: FlatModel, description: DataDescription) -> None:
    """Refuse a model whose type no sum has, or one of another type than float32, which samples of numbers come as, that
    does not take them for it.

    It has been tried on samples of its own type. The model is then bound to a scratch copy of its initial values.
    """
    if model.dtype not in (torch.float16, torch.float32, torch.float64):
        raise UserError(
            f"the model's values are {model.dtype}, of which no sums are made: build it in float32; local.precision = "
            '"bfloat16" computes its gradients in bfloat16'
        )
    if model.dtype == torch.float32 or description.task == "text":
        return
    model.bind(model.initial.clone())
    model.restart()
    try:
        with torch.no_grad(), kept_generators(), model.masks.given_by(NoMasks()):
            model.module(_made_up_samples(model, description).float())
    except Exception as error:
        raise UserError(
            f"the model's values are {model.dtype}, but samples come as float32, which it cannot read "
            f"({raised(error)}): begin its forward pass with x = x.to({model.dtype}), or build it in float32"
        ) from error
    finally:
        model.restart()


def check_precision(model: FlatModel, description: DataDescription, precision: Precision) -> None:
    """Reject a `local.precision` in which this device cannot train the model.

    A gradient of a few made-up samples is computed in it. The model is then bound to a scratch copy of its initial
    values.
    """
    if precision == "float32":
        return
    x, masks = _made_up_samples(model, description), ClientMasks(lambda: np.random.Generator(np.random.Philox(0)))
    model.bind(model.initial.clone())
    was_training = model.module.training
    model.module.train()
    try:
        with torch.enable_grad(), kept_generators(), model.masks.given_by(masks), model.computing_in(precision):
            model.own_gradient(lambda module, x, _: module(x).float().sum(), x, x)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f'local.precision = "{precision}" is not possible with this model on this {model.device.type.upper()} '
            f'({raised(error)}). Set local.precision = "float32".'
        ) from error
    finally:
        model.module.train(was_training)
        model.restart()


def _try_out(model: FlatModel, description: DataDescription) -> ForwardTraits:
    x = _made_up_samples(model, description)
    values = model.initial.clone()
    model.bind(values)
    was_training = model.module.training
    model.module.train()
    masks = NoMasks()
    calls = model.dropout_calls
    calls.met = False
    gradients = [one.grad for one in model.parameters]
    for one in model.parameters:
        one.grad = None
    try:
        with kept_generators(), full_precision(), model.masks.given_by(masks), model.kept.watched():
            with _tried(model, description):
                writes = _writes(model, x, values[: model.trainable])  # some write in their first pass only
                x = _check_outputs(model, x, description)
                draws = _draws(model, x, description)
                torch.default_generator.manual_seed(0)
                with calls:
                    masks.asked = False
                    whole = _outputs(model, x, description)
                    drops = masks.asked
                    halves = [_outputs(model, half, description) for half in x.chunk(2)]
                    kept, least = _bytes_kept(model, x), _least(model, x, description)
                    couples = least > 1 or not torch.allclose(whole, torch.cat(halves), rtol=1e-3, atol=1e-5)
                    torch_drops = drops and (masks.compiled or _compiled(model) or _drops_again(model, x, masks))
                    across = drops and not couples and not torch_drops and _drops_across(model, description)
                    check_gradient(model, x)
            loss = loss_traits(model.loss, whole, description)
        with _tried(model, description):
            if not couples and model.kept.changes:
                couples = _goes_on(model, x)
            bends = not (draws or couples or writes) and bends_gradients(model, x)
    finally:
        model.module.train(was_training)
        for one, gradient in zip(model.parameters, gradients, strict=True):
            one.requires_grad_().grad = gradient
    return ForwardTraits(
        draws or torch_drops, couples, loss, *kept, calls.met, across, torch_drops, drops, writes, bends, least
    )


@contextmanager
def _tried(model: FlatModel, description: DataDescription) -> Iterator[None]:
    """Around passes of made-up samples: those that fail are named, with the line where the model is the user's own."""
    try:
        yield
    except (UserError, PartFailure, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() in a model must not end the run as if it were done
        mode = "" if model.module.training else " in evaluation mode"
        samples = f"{description.task} samples of shape {tuple(description.feature_shape)}{mode}"
        if model.part is None:
            raise UserError(f"the model cannot read {samples}: {raised(error)}") from error
        problem = f"it cannot read {samples}, made up before the first round: {raised(error)}"
        raise failure_of(model.part, error, problem) from error


def _goes_on(model: FlatModel, x: Tensor) -> bool:
    """Whether passes in training mode give other values behind another pass, by what that has left, or beside fewer
    samples, of which a first pass may keep something."""
    model.module.train()
    with kept_generators(), full_precision(), model.masks.given_by(NoMasks()), model.dropout_calls:
        model.restart()
        one, other = model.module(x), model.module(x)
        model.restart()
        fewer = model.module(x[: len(x) // 2])
    model.restart()
    again = torch.allclose(one, other, rtol=1e-3, atol=1e-5)
    return not again or not torch.allclose(one[: len(fewer)], fewer, rtol=1e-3, atol=1e-5)


def _compiled(model: FlatModel) -> bool:
    return any(hasattr(part, "_orig_mod") for part in model.module.modules())


def _drops_again(model: FlatModel, x: Tensor, masks: NoMasks) -> bool:
    """Whether the backward pass drops values, being a forward pass as well (`torch.utils.checkpoint`)."""
    outputs = model.module(x)
    if not outputs.requires_grad:
        return False
    masks.asked = False
    try:
        gradients_within(model.dropout_calls, outputs.sum(), model.parameters)
    except RuntimeError:  # check_gradient says so
        return False
    return masks.asked


class _DropsOneRow:
    """Masks that drop everything of one row of a batch."""

    def __init__(self, rows: int, dropped: int | None = None):
        self.rows, self.dropped, self.other = rows, dropped, False

    def mask(self, rows: int, units: int, p: float) -> Tensor:
        mask = torch.ones(rows, units)
        self.other |= rows != self.rows
        if self.dropped is not None and rows == self.rows:
            mask[self.dropped] = 0
        return mask


def _drops_across(model: FlatModel, description: DataDescription) -> bool:
    """Whether dropout of a row of masks changes other samples than that of this row, or sees another number of rows.

    Tried on a batch of many, and on a few samples, texts among them with much padding and no word at all, whose masks
    are dropped row by row.
    """
    previous = model.masks.source
    try:
        many = rows_per_pass(description, MANY_ROWS)
        model.masks.source = counting = _DropsOneRow(many)
        model.module(_made_up_samples(model, description, many))
        if counting.other:
            return True
        x = _made_up_samples(model, description)
        if description.task == "text":
            for row, words in enumerate((2, 9, 0, 1)):
                x[row, words:] = 0
        model.masks.source = counting = _DropsOneRow(len(x))
        whole = model.module(x)
        for row in range(len(x)):
            model.masks.source = counting = _DropsOneRow(len(x), row)
            others = torch.arange(len(x), device=x.device) != row
            found = model.module(x)
            if counting.other or not torch.allclose(found[others], whole[others], 1e-3, 1e-5, equal_nan=True):
                return True
    finally:
        model.masks.source = previous
    return False


def rows_of_a_pass(model: FlatModel, description: DataDescription, most: int, training: bool = False) -> int:
    """How many samples to pass through a model at once.

    `most`; fewer where they have very many outputs, or where on a processor the widest layer would make more than
    `PASS_BYTES` of them. Samples that influence one another are not parted for that.
    """
    rows = rows_per_pass(description, most)
    if model.device.type != "cpu":
        return rows
    traits = forward_traits(model, description)
    fewer = min(rows, max(LEAST_ROWS, PASS_BYTES // max(1, traits.bytes_widest)))
    if fewer == rows:
        return rows
    coupled = traits.couples or traits.loss.couples if training else couples_in_evaluation(model, description)
    return rows if coupled else fewer


def couples_in_evaluation(model: FlatModel, description: DataDescription) -> bool:
    """Whether a sample's loss depends, in evaluation mode, on the samples that go through the model beside it.

    Tried on a few made-up samples where it does so in training mode; neither the model's values nor any generator
    change. The model is then bound to a scratch copy of its initial values.
    """
    traits = forward_traits(model, description)
    if traits.loss.couples or traits.loss.draws:
        return True
    if not traits.couples and not traits.draws:
        return False
    x = _made_up_samples(model, description)
    model.bind(model.initial.clone())
    was_training = model.module.training
    model.restart()
    model.module.eval()
    try:
        with (
            torch.no_grad(),
            kept_generators(),
            full_precision(),
            model.masks.given_by(NoMasks()),
            _tried(model, description),
        ):
            whole = model.module(x)
            return not torch.allclose(whole, torch.cat([model.module(half) for half in x.chunk(2)]), 1e-3, 1e-5)
    finally:
        model.module.train(was_training)


def _check_outputs(model: FlatModel, x: Tensor, description: DataDescription) -> Tensor:
    """Check the outputs in both modes; the samples that gave numbers.

    These are x, or numbers between 0 and 1 where the model cannot compute with others (a logarithm, a logit).
    """
    for training in (True, False):
        if _outputs(model, x, description, training).isnan().any():
            x = x.sigmoid() if x.is_floating_point() else x
            if _outputs(model, x, description, training).isnan().any():
                raise UserError(
                    f"the model returns NaN in {_mode(training)} for samples made up before the first round. Check its "
                    "layers and initial values"
                )
    model.module.train()
    return x


def _least(model: FlatModel, x: Tensor, description: DataDescription) -> int:
    """Samples that a training batch has at the least: 2 where one alone fails, gives NaN or loses its axis, else 1."""
    try:
        return 1 + bool(_outputs(model, x[:1], description).isnan().any())
    except Exception:  # batch norm: "Expected more than 1 value per channel when training"
        return 2


def _writes(model: FlatModel, x: Tensor, values: Tensor) -> bool:
    """Whether forward passes write to these values, those of the parameters, or put others in their place.

    What else they write to is noted for what the model keeps: a mean of weights, which is these weights at first, shows
    no change yet. Nothing is compiled while that is looked at.
    """
    eager: AbstractContextManager[Any] = nullcontext()
    if "torch._dynamo" in sys.modules:
        eager = torch.compiler.set_stance("force_eager")
    displaced, places = False, model.shared_buffers.places()
    with Written(values) as written, eager:
        for training in (True, False):
            model.module.train(training)
            with torch.set_grad_enabled(training):
                model.module(x.clone())
            _check_trained(model)
            displaced |= bool(model.bound_values.displaced())  # the second pass may undo what the first one does
    model.kept.note_written(written.memory)
    model.shared_buffers.check_unwritten(places, written.spans, _changed_buffers(model))
    return written.found or displaced


def _changed_buffers(model: FlatModel) -> list[Tensor]:
    first = torch.split(model.initial[model.trainable :], [one.numel() for one in model.buffers])
    return [one for one, value in zip(model.buffers, first, strict=True) if not torch.equal(one.reshape(-1), value)]


def _check_trained(model: FlatModel) -> None:
    """Refuse a forward pass that freezes parameters which are trained."""
    names = {id(one): name for name, one in model.module.named_parameters()}
    frozen = [names.get(id(one), "?") for one in model.parameters if not one.requires_grad]
    if frozen:
        raise UserError(
            f"the model's forward pass freezes parameters ({frozen[0]}.requires_grad = False) that are trained and "
            "travel: freeze them where the model is built, or detach() what is made of them"
        )


def _draws(model: FlatModel, x: Tensor, description: DataDescription) -> bool:
    """Whether generators are drawn from in evaluation mode, or in training mode for more than dropout."""
    before, stood = generator_states(), held_states(model.generators)
    _outputs(model, x, description, training=False)
    with model.dropout_calls:
        _outputs(model, x, description)
    return bool(drawn_from(before)) or drawn_from_held(model.generators, stood)


def _bytes_kept(model: FlatModel, x: Tensor) -> tuple[int, int]:
    """Bytes a sample of what a forward pass keeps for the backward pass, and of the largest piece of it.

    Each piece is what it grows by with the samples: weights, frozen ones or made of others, do not.
    """
    fewer = x[: len(x) // 2].clone()
    whole, part = _bytes_saved(model, x), _bytes_saved(model, fewer)
    if len(whole) != len(part):
        fewer, part = x[:0], [0] * len(whole)
    each = [max(0, one - other) // (len(x) - len(fewer)) for one, other in zip(whole, part, strict=True)]
    return sum(each), max(each, default=0)


def _bytes_saved(model: FlatModel, x: Tensor) -> list[int]:
    """Bytes of every piece of memory that a forward pass keeps for the backward pass, in the order of the pass."""
    held: dict[int, torch.UntypedStorage] = {}  # kept, so that no other takes the place of one

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            held.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor.detach()  # a tensor that knows its graph would keep that alive for ever, being kept by it

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        try:
            model.module(x)
        except RuntimeError:  # torch.func.grad within takes no such hooks; what else fails does so without them, too
            return []
    return [storage.nbytes() for storage in held.values()]


def _outputs(model: FlatModel, x: Tensor, description: DataDescription, training: bool = True) -> Tensor:
    """The model's outputs in this mode, detached."""
    model.module.train(training)
    given = x.clone()
    with torch.set_grad_enabled(training):  # as in training: hooks may be put on values
        outputs = model.module(given)
    if not torch.equal(given, x):
        raise UserError(
            "the model changes its input in place, as x /= 2 or a first layer with inplace=True do, which would "
            "spoil the samples for later rounds: write x = x / 2, or clone x first"
        )
    if not isinstance(outputs, Tensor) or not description.takes_outputs(tuple(outputs.shape), len(x)):
        found = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        wanted = f"({', '.join(map(str, ('samples', *description.output_shape)))})"
        what = {
            "classification": f"logits of shape {wanted}, one per class of the data",
            "tokens": f"logits of shape {wanted}, one per class at every position",
            "multilabel": f"logits of shape {wanted}, one per label",
            "regression": f"outputs of shape {wanted}, the numbers to predict",
        }[description.targets]
        raise UserError(
            f"the model must return {what}, but in {_mode(training)} it returned {found} for a batch of {len(x)}. "
            "Return that tensor alone"
        )
    if not outputs.is_floating_point():
        raise UserError(
            f"the model must return real numbers, not complex ones or whole ones, but in {_mode(training)} it returned "
            f"{outputs.dtype}. Return the logits, not the classes or labels made of them"
        )
    if outputs.device != x.device:
        raise UserError(f"the model must return logits where its input lies, on {x.device}, not on {outputs.device}")
    return outputs.detach()


def _mode(training: bool) -> str:
    return "training mode" if training else "evaluation mode"


def _made_up_samples(model: FlatModel, description: DataDescription, rows: int = TRIAL_ROWS) -> Tensor:
    generator = np.random.Generator(np.random.Philox(0))
    shape = (rows, *description.feature_shape)
    if description.task == "text":
        tokens = generator.integers(0, max(description.vocabulary, 1), shape, dtype=np.int32)
        return torch.from_numpy(tokens).to(model.device)
    values = torch.from_numpy(generator.standard_normal(shape))
    return values.to(device=model.device, dtype=model.dtype)
