"""The built-in algorithms of local work: plain steps, SCAFFOLD, FedDyn, FedNova."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.random import Generator

from fedmpi.common.registry import register
from fedmpi.local.algorithm import LocalAlgorithm, Totals, Vectors, Work
from fedmpi.local.schedule import effective_steps

if TYPE_CHECKING:
    from torch import Tensor

    from fedmpi.config import Config


@register("local algorithm", name="plain")
class Plain(LocalAlgorithm):
    """The local optimizer's steps on the client's own loss, and nothing else (McMahan et al. 2017, Algorithm 1)."""


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
        sampler = config.clients.sampler
        twice = sampler.name == "clustered-md" or (sampler.name == "weighted" and sampler.options["replace"])
        if config.server.weights.name != "uniform" or twice:
            return (
                'its next model is the plain mean of the participants\': set server.weights = "uniform" and draw '
                "clients without replacement"
            )
        if config.server.aggregator.name != "mean":
            return 'its next model is the participants\' mean less h/α: set server.aggregator = "mean"'
        optimizer = config.server.optimizer
        if optimizer.name != "sgd" or optimizer.options["lr"] != 1:
            return (
                'its next model is the participants\' mean less h/α: set server.optimizer = "sgd" and '
                "server.optimizer.lr = 1"
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
    """Updates per local step, so that clients with many steps do not dominate (Wang et al. 2020).

    The update becomes τ_eff Σ p_k (w_k − w)/τ_k with τ_eff = Σ p_k τ_k, where τ_k is the number of local steps, or with
    a proximal term μ the sum of their shrinking weights, Σ_{j<τ_k} |1 − ημ|^j.
    """

    sums = ("direction",)
    numbers = ("steps",)

    def refuses(self, config: Config) -> str | None:
        weights = config.server.weights.component
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
    if optimizer.name != "sgd" or not optimizer.has_defaults:
        return f'local.optimizer = {optimizer!r} does not go with it: {why}: set local.optimizer = "sgd"'
    if config.local.proximal_mu and not proximal:
        return f"local.proximal_mu does not go with it: {why}: leave it at 0"
    return None
