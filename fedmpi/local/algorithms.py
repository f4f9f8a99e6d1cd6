"""Algorithms of local work: the base class for custom ones, and plain steps, SCAFFOLD, FedDyn, FedNova.

An algorithm may change a client's gradients by a constant vector and a proximal pull. It may keep vectors of every
client and of the server between rounds, and sum further vectors over the selected clients. It may also change the
update before the server optimizer gets it. fedmpi still defines the steps, batches, weights and sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.random import Generator

from fedmpi.common.calling import is_complex
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmpi.config import Config
else:
    torch = Later("torch")


@dataclass(frozen=True)
class Work:
    """Work of a client in a round.

    Attributes
    ----------
    delta : Tensor (d,)
        w_k − w, the change by the client's local steps. Float buffers such as batch norm's statistics come last.
        Read-only: a `finish` that changes it in place fails.
    steps : int
        Number of local steps that the client took.
    lr : float
        Learning rate of these steps.
    coefficient : float
        Factor of the client's update in the sum; divided by `Totals.divisor` it is the client's share of the mean.
    proximal_mu : float
        μ of the proximal pull.
    samples : int
        Number of samples that the client trained on, each counted once.
    """

    delta: Tensor
    steps: int
    lr: float
    coefficient: float
    proximal_mu: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class Totals:
    """Facts of a round that the server knows when it steps.

    Attributes
    ----------
    population : int
        N, the number of clients.
    participants : int
        m, the number of clients whose updates were summed.
    weight : float
        Σ coefficient over these clients; for weights with `after`, the divisor of the sums.
    divisor : float
        Divisor that turns the weighted sum into the update: `weight`, or 1 for weights that are not normalized.
    round : int
    lr : float
        Local learning rate of the round.
    """

    population: int
    participants: int
    weight: float
    divisor: float = 1.0
    round: int = 0
    lr: float = 0.0


class LocalAlgorithm:
    """Local work with state. Subclass it and override the methods that you need; all are optional.

    Hooks of one client share a generator in each round; `server_step` has its own. The keyword-only parameters of the
    constructor are options, set in the configuration next to `local.algorithm`.

    Attributes
    ----------
    client_state : tuple of str
        Vectors (d,) kept for every client that has been selected before, initially zero: `client.NAME`.
    server_state : tuple of str
        Vectors (d,), identical on every rank and initially zero: `server.NAME`.
    sums : tuple of str
        Names of vectors that `finish` returns; they are summed over the selected clients.
    numbers : tuple of str
        Names of numbers that `finish` returns; they are summed likewise.
    sent : tuple of str or None
        Vectors of the server that clients receive with the model and that their hooks may read; None = all of them.
    proximal_mu : float
        μ of a proximal pull μ (w − w_start) that is added to every local gradient, in addition to `local.proximal_mu`.
    objective : None or method
        `objective(self, module, x, y, client, server, generator)` returns the loss of a batch and replaces the loss of
        the task. Its gradient is taken through `module`. Clients are then trained sequentially.
    train : None or method
        `train(self, client, server, steps, generator)` does a client's local work by calls of `steps`. Clients are then
        trained sequentially. `steps()` takes the local steps on the client's model. Its keywords are `epochs`, or
        `steps` (a number), and `lr` instead of those of `local`; `only`: "personal" or "shared", which values change;
        `towards` (d,) and `proximal_mu`: a proximal pull. `steps(start)` with a vector (d,) trains a copy from there
        instead, on the loss of the task, without corrections and counts. Both return the values (d,).
    personal_model : None or method
        `personal_model(self, client, server, steps)` returns the model (d,) with which a client is evaluated. It must
        not change `client`. `server.model` is the new global model, and `steps` is that of `train`.
    from_initial : tuple of str
        Vectors of `client_state` that start as the initial model instead of zero.
    task_loss : function
        `task_loss(outputs, targets)` returns the mean loss () of the task; set before `start`.
    least_batch : int
        Fewest samples with which the model can be trained: 2 with batch norm, else 1; set before `start`.
    counts_once : bool
        True rejects cohorts in which a client counts more than once.
    """

    __fedmpi__: ClassVar[dict[str, Any]] = {"kind": "local algorithm"}
    client_state: ClassVar[Sequence[str]] = ()
    server_state: ClassVar[Sequence[str]] = ()
    sums: ClassVar[Sequence[str]] = ()
    numbers: ClassVar[Sequence[str]] = ()
    sent: ClassVar[Sequence[str] | None] = None
    proximal_mu: float = 0.0
    objective: Callable[..., Tensor] | None = None
    train: Callable[..., None] | None = None
    personal_model: Callable[..., Tensor] | None = None
    from_initial: ClassVar[Sequence[str]] = ()
    task_loss: Callable[[Tensor, Tensor], Tensor]
    least_batch: int
    counts_once: ClassVar[bool] = False

    def refuses(self, config: Config) -> str | None:
        """Return why the algorithm does not work with the rest of the configuration and what to do, or None."""
        return None

    def start(self, module: nn.Module, layout: Mapping[str, slice], generator: Generator) -> None:
        """Prepare the algorithm before the first round, also after a resume, identically on every rank.

        Parameters
        ----------
        module : nn.Module
            A copy of the initial model in evaluation mode.
        layout : mapping of str to slice
            Positions of each parameter, and of each float buffer that is sent, in the vectors (d,).
        generator : Generator
        """

    def correction(self, client: Vectors, server: Vectors, generator: Generator) -> Tensor | None:
        """Return a vector (d,) that is added to every gradient of the client's local steps in this round, or None.

        It is the gradient of a linear term ⟨correction, w⟩ of the local objective.
        """
        return None

    def finish(self, client: Vectors, server: Vectors, work: Work, generator: Generator) -> Mapping[str, Any] | None:
        """Update a client's state after its local steps; return the values that `sums` and `numbers` name."""
        return None

    def server_step(
        self, server: Vectors, update: Tensor, sums: Mapping[str, Any], totals: Totals, generator: Generator
    ) -> Tensor | None:
        """Set the server's state and return the update for the optimizer, once per round and identically on every rank.

        Parameters
        ----------
        server : Vectors
        update : Tensor (d,)
            The weighted mean of w_k − w (the sum, for weights that are not normalized), or the result of
            `server.aggregator`.
        sums : mapping of str to Tensor (d,) or float
            The values that `finish` returned, summed over the selected clients.
        totals : Totals
        generator : Generator

        Returns
        -------
        Tensor (d,) or None
            None = `update` as it is. Float buffers, such as batch norm's statistics, keep their weighted mean.
        """
        return update


def misnamed(algorithm: LocalAlgorithm) -> dict[str, str]:
    """Return the attributes of a custom algorithm that nothing reads, each with the name that was probably meant.

    An attribute is listed if `LocalAlgorithm` lacks it but has one of a similar name. Options and names with a leading
    underscore are ignored.
    """
    known = [name for name in dir(LocalAlgorithm) if not name.startswith("_")]
    own = {name for name in dir(algorithm) if not name.startswith("_")} - {
        *known,
        *signature(type(algorithm)).parameters,
    }
    near = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in sorted(own)}
    return {name: found[0] for name, found in near.items() if found}


class Vectors:
    """Named vectors (d,) as attributes: the state of a client or of the server.

    Setting an attribute replaces its entry in `vectors`, unless `closed` gives a reason against it. `facts` are further
    attributes, which may only be read.
    """

    def __init__(self, owner: str, vectors: dict[str, Tensor], facts: dict[str, Any], closed: str | None = None):
        self.__dict__.update(_owner=owner, _vectors=vectors, _facts=facts, _closed=closed)

    def __getattr__(self, name: str) -> Any:
        if name in self._vectors:
            return self._vectors[name]
        if name in self._facts:
            return self._facts[name]
        raise AttributeError(f"{self._owner}.{name} does not exist: {self._listed()}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._vectors:
            raise AttributeError(f"{self._owner}.{name} is not kept: {self._listed()}")
        if self._closed is not None:
            raise AttributeError(f"{self._owner}.{name} cannot be set here: {self._closed}")
        kept = self._vectors[name]
        self._vectors[name] = vector_like(kept, value, f"{self._owner}.{name}")

    def _listed(self) -> str:
        return f"{self._owner}_state declares {', '.join(self._vectors) or 'nothing'}; it has {', '.join(self._facts)}"


def vector_like(kept: Tensor, value: Any, what: str) -> Tensor:
    """Return a value as a vector of the length, type and device of `kept`; a number fills the whole vector."""
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic | float | int):
        raise TypeError(f"{what} must be a vector of {kept.numel()} values, not {type(value).__name__}")
    if is_complex(value):
        raise TypeError(f"{what} must be a vector of {kept.numel()} real numbers, not complex ones")
    vector = torch.as_tensor(value).detach().to(device=kept.device, dtype=kept.dtype)
    if vector.dim() == 0:
        return vector.expand(kept.shape).clone()
    if vector.shape != kept.shape:
        raise ValueError(f"{what} must be a vector of {kept.numel()} values, not of shape {tuple(vector.shape)}")
    return vector


@register("local algorithm", name="plain")
class Plain(LocalAlgorithm):
    """Take the local optimizer's steps on the client's loss without corrections (McMahan et al. 2017, Algorithm 1)."""


@register("local algorithm", name="scaffold")
class Scaffold(LocalAlgorithm):
    """Control variates that correct the drift of local steps (Karimireddy et al. 2020, Algorithm 1, option II).

    Client and server keep c_k and c. Every local gradient gains c − c_k; after K steps of rate η,
    c_k⁺ = c_k − c + (w − w_k) / (K η), and the server adds Σ (c_k⁺ − c_k) / N to c.
    """

    client_state = ("c",)
    server_state = ("c",)
    sums = ("dc",)

    def refuses(self, config: Config) -> str | None:
        return _needs_sgd(config, "its control variates are means of gradients, which only SGD's steps give back")

    def correction(self, client: Vectors, server: Vectors, generator: Generator) -> Tensor:
        correction: Tensor = server.c - client.c
        return correction

    def finish(self, client: Vectors, server: Vectors, work: Work, generator: Generator) -> dict[str, Tensor]:
        change = (work.delta / (-work.steps * work.lr)).sub_(server.c)
        client.c += change
        return {"dc": change}

    def server_step(
        self, server: Vectors, update: Tensor, sums: Mapping[str, Any], totals: Totals, generator: Generator
    ) -> Tensor:
        server.c += sums["dc"] / totals.population
        return update


@register("local algorithm", name="feddyn")
class FedDyn(LocalAlgorithm):
    """Dynamic regularization, which makes local optima agree with the global one (Acar et al. 2021, Algorithm 1).

    Client k minimizes L_k(w) − ⟨g_k, w⟩ + α/2 ‖w − w_t‖² and then sets g_k ← g_k − α (w_k − w_t). The server sets
    h ← h − α/N Σ (w_k − w_t), and the next model is the plain mean of the w_k less h/α. The rule for g_k follows from
    the condition of the minimum, ∇L_k(w_k) = g_k − α (w_k − w_t), whichever local optimizer reached it.

    Parameters
    ----------
    alpha : float
        α > 0, weight of the regularization.
    """

    client_state = ("g",)
    server_state = ("h",)
    sent = ()
    counts_once = True

    def __init__(self, *, alpha: float = 0.1):
        self.alpha = self.proximal_mu = alpha

    def refuses(self, config: Config) -> str | None:
        if not 0 < self.alpha < float("inf"):
            return f"local.algorithm.alpha = {self.alpha:g} must be a positive number"
        if config.local.proximal_mu:
            return "its own α is the weight of the proximal term: leave local.proximal_mu at 0"
        sampler, server = config.clients.sampler, config.server
        twice = sampler.name == "clustered-md" or (sampler.name == "weighted" and sampler.options["replace"])
        if server.weights.name != "uniform" or twice:
            return 'it takes the plain mean: set server.weights = "uniform" and draw clients without replacement'
        plain = server.optimizer.name == "sgd" and server.optimizer.options["lr"] == 1
        if server.aggregator.name != "mean" or not plain:
            return (
                'its next model is the participants\' mean less h/α: set server.aggregator = "mean", '
                'server.optimizer = "sgd" and server.optimizer.lr = 1'
            )
        return None

    def correction(self, client: Vectors, server: Vectors, generator: Generator) -> Tensor:
        correction: Tensor = client.g.neg()
        return correction

    def finish(self, client: Vectors, server: Vectors, work: Work, generator: Generator) -> None:
        client.g.sub_(work.delta, alpha=self.alpha)

    def server_step(
        self, server: Vectors, update: Tensor, sums: Mapping[str, Any], totals: Totals, generator: Generator
    ) -> Tensor:
        server.h -= update * (self.alpha * totals.participants / totals.population)
        step: Tensor = update - server.h / self.alpha
        return step


@register("local algorithm", name="fednova")
class FedNova(LocalAlgorithm):
    """Normalize updates by local steps, so that clients with many steps do not dominate (Wang et al. 2020).

    The update becomes τ_eff Σ p_k (w_k − w)/τ_k with τ_eff = Σ p_k τ_k, where τ_k is the number of local steps, or with
    a proximal term μ the sum of their shrinking weights, Σ_{j<τ_k} |1 − ημ|^j.
    """

    sums = ("direction",)
    numbers = ("steps",)

    def refuses(self, config: Config) -> str | None:
        weights = config.server.weights
        if weights.marks.get("averages_models") or hasattr(weights.object, "after"):
            return f'server.weights = "{weights.name}" makes no weighted mean of updates: choose others'
        return _needs_sgd(config, "it knows what local steps add up to for SGD only", proximal=True)

    def finish(self, client: Vectors, server: Vectors, work: Work, generator: Generator) -> dict[str, Any]:
        steps = effective_steps(work.steps, work.lr * work.proximal_mu)
        return {"direction": work.delta * (work.coefficient / steps), "steps": work.coefficient * steps}

    def server_step(
        self, server: Vectors, update: Tensor, sums: Mapping[str, Any], totals: Totals, generator: Generator
    ) -> Tensor:
        effective = sums["steps"] / totals.weight  # a mean of steps, even if weights are not normalized
        step: Tensor = sums["direction"] * (effective / totals.divisor)
        return step


def _needs_sgd(config: Config, why: str, proximal: bool = False) -> str | None:
    optimizer = config.local.optimizer
    if optimizer != Component("local optimizer", "sgd"):
        return f'local.optimizer = {optimizer!r} does not go with it: {why}: set local.optimizer = "sgd"'
    if config.local.proximal_mu and not proximal:
        return f"local.proximal_mu does not go with it: {why}: leave it at 0"
    return None


def shrinking_sum(steps: int, shrinking: float) -> float:
    """Return Σ_{j<τ} (1 − s)^j of τ steps that shrink by s, which is τ for s = 0; infinite on overflow."""
    if shrinking == 0:
        return float(steps)
    try:
        shrunk = -math.expm1(steps * math.log1p(-shrinking)) if shrinking < 0.5 else 1 - (1 - shrinking) ** steps
    except OverflowError:
        return math.inf
    return shrunk / shrinking


def effective_steps(steps: int, shrinking: float) -> float:
    """Return ‖a‖₁ of τ steps of SGD with a proximal term: Σ_{j<τ} |1 − ημ|^j, τ without one (Wang et al. 2020).

    Above ημ = 1 every step overshoots the start, and the weights of the gradients alternate in sign.
    """
    return shrinking_sum(steps, shrinking if shrinking <= 1 else 2 - shrinking)
