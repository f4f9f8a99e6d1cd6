"""What a model's outputs cost, sample by sample: built-in losses, and the loss that a run trains and evaluates with.

A loss is a function (outputs, targets) -> (b,): one value a sample, of that sample's outputs and target alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedmpi.common.calling import is_complex, naming, refuse_result, takes
from fedmpi.common.errors import UserError
from fedmpi.common.generators import kept_generators
from fedmpi.common.later import Later
from fedmpi.common.registry import Part, register, resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional

    PerSample = Callable[[Tensor, Tensor], Tensor]
else:
    torch, functional = Later("torch"), Later("torch.nn.functional")


@register("loss", "cross-entropy")
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log of the target's probability under the softmax of the outputs.

    Parameters
    ----------
    outputs : Tensor (b, C)
    targets : int64 Tensor (b,)

    Returns
    -------
    Tensor (b,)
    """
    return functional.cross_entropy(outputs, targets, reduction="none")


@register("loss", "label-smoothing")
def label_smoothing(outputs: Tensor, targets: Tensor, *, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy towards a target that leaves a share of its weight to all classes alike (Szegedy et al. 2016, §7).

    Parameters
    ----------
    outputs : Tensor (b, C)
    targets : int64 Tensor (b,)
    smoothing : float
        Share of the weight, in [0, 1], that is spread evenly over the C classes.
    """
    if not 0 <= smoothing <= 1:
        raise UserError(f"task.smoothing = {smoothing:g}: a share of the weight lies in [0, 1]")
    return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)


@register("loss", "focal")
def focal(outputs: Tensor, targets: Tensor, *, gamma: float = 2.0) -> Tensor:
    """(1 − p)^γ · −log p with p the target's probability: samples told well already count less (Lin et al. 2017, Eq 4).

    Parameters
    ----------
    outputs : Tensor (b, C)
    targets : int64 Tensor (b,)
    gamma : float
        γ ≥ 0; 0 is cross-entropy.
    """
    if not gamma >= 0:
        raise UserError(f"task.gamma = {gamma:g}: the exponent of the focal loss is 0 or more")
    surprise = functional.cross_entropy(outputs, targets, reduction="none")
    missing = -torch.expm1(-surprise)
    return missing.clamp_min(torch.finfo(missing.dtype).tiny) ** gamma * surprise


class Loss:
    """The loss of a run: a function per sample, and what training and evaluation make of it.

    Parameters
    ----------
    part : Part
        A loss of `fedmpi.common.registry`.
    options : mapping, optional
        Its options.
    """

    def __init__(self, part: Part, options: Mapping[str, Any] | None = None):
        self.part = part
        with naming(part):
            self._function: PerSample = part.make(options or {})
        takes(part, self._function, "outputs", "targets")

    @property
    def name(self) -> str:
        """As the configuration names it."""
        return self.part.name

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every sample, (b,), of the outputs' type.

        Raises
        ------
        PartFailure
            The function raised an exception, or returned anything else.
        """
        if self.part.foreign:  # which may change what it is given: the labels are those of the data
            outputs = outputs if outputs.requires_grad else outputs.clone()
            targets = targets.clone()
        with naming(self.part):
            losses = self._function(outputs, targets)
        if not isinstance(losses, torch.Tensor) or losses.shape != outputs.shape[:1]:
            raise refuse_result(self.part, _wrong_shape(losses, len(outputs)))
        if is_complex(losses):
            raise refuse_result(self.part, "returned complex numbers: return real ones")
        return losses if losses.dtype == outputs.dtype else losses.to(outputs.dtype)

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over the samples, ()."""
        return self.per_sample(outputs, targets).mean()

    def total(self, outputs: Tensor, targets: Tensor) -> float:
        """The sum over the samples."""
        return float(self.per_sample(outputs, targets).sum())

    def kept_generators(self) -> AbstractContextManager[None]:
        """Around work that calls the loss many times: whatever a foreign one draws, global generators are as before."""
        return kept_generators() if self.part.foreign else nullcontext()


def _wrong_shape(returned: Any, samples: int) -> str:
    found, mean = type(returned).__name__, ""
    if isinstance(returned, torch.Tensor) and returned.dim():
        found = f"a tensor of shape {tuple(returned.shape)}"
    elif isinstance(returned, torch.Tensor):
        found, mean = "a single number", ': leave out the mean (reduction="none" in torch)'
    return f"returned {found} for {samples} samples, but a loss gives one value a sample, shape ({samples},){mean}"


class CrossEntropyLoss(Loss):
    """Cross-entropy with torch's own kernels for its mean and its sum."""

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def total(self, outputs: Tensor, targets: Tensor) -> float:
        return float(functional.cross_entropy(outputs, targets, reduction="sum"))


CROSS_ENTROPY = CrossEntropyLoss(resolve("loss", cross_entropy))


def task_loss(choice: Any = "cross-entropy", options: Mapping[str, Any] | None = None) -> Loss:
    """The loss of a run.

    Parameters
    ----------
    choice : str or callable
        A built-in name, "package.module:object", or the function itself.
    options : mapping, optional
        Its options.

    Raises
    ------
    UserError
        Unknown name or option, failing import.
    """
    part = resolve("loss", choice)
    return CrossEntropyLoss(part, options) if part.object is cross_entropy else Loss(part, options)


@dataclass(frozen=True)
class LossTraits:
    """What is found out about a loss by trying it.

    Attributes
    ----------
    draws : bool
        It draws from torch's global generator.
    couples : bool
        A sample's loss depends on the other samples given with it; means nothing where it draws.
    """

    draws: bool = False
    couples: bool = False


def loss_traits(loss: Loss, outputs: Tensor, classes: int) -> LossTraits:
    """Try a loss on some outputs; call it where torch's generators are put back afterwards.

    Parameters
    ----------
    loss : Loss
    outputs : Tensor (b, C)
        Of a model; left as they are.
    classes : int
        C: the targets tried are 0, 1, …, C − 1, 0, …

    Raises
    ------
    PartFailure
        It fails, returns no value a sample, or values without a gradient.
    """
    if isinstance(loss, CrossEntropyLoss):
        return LossTraits()
    targets = torch.arange(len(outputs), device=outputs.device) % classes
    before = torch.get_rng_state()
    with torch.enable_grad():
        tried = outputs.detach().clone().requires_grad_()
        whole = loss.per_sample(tried, targets)
        depends = whole.requires_grad and torch.autograd.grad(whole.sum(), tried, allow_unused=True)[0] is not None
        if not depends:
            raise refuse_result(
                loss.part,
                "its values have no gradient by the outputs: compute them with torch's own functions, without argmax, "
                ".detach() or NumPy",
            )
    draws = not torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        halves = zip(tried.chunk(2), targets.chunk(2), strict=True)
        parts = torch.cat([loss.per_sample(some, own) for some, own in halves])
    return LossTraits(draws, couples=not torch.allclose(whole, parts, rtol=1e-3, atol=1e-5))


def why_loss_alone(traits: LossTraits) -> str | None:
    """Why clients with this loss are trained one by one, or None where their samples may be joined."""
    if traits.draws:
        return "task.loss draws from torch's own generator"
    if traits.couples:
        return "task.loss of a sample depends on the other samples of its batch"
    return None
