"""Local algorithms for models of single clients: FedRep, Ditto, Per-FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from numpy.random import Generator
from pydantic import Field

from fedmpi.common.imports import Later
from fedmpi.common.registry import register
from fedmpi.local.algorithms import LocalAlgorithm, Vectors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmpi.config import Config
else:
    torch = Later("torch")

Steps = Callable[..., Any]
Rate = Annotated[float, Field(gt=0, le=1e6)]


@register("local algorithm", name="fedrep")
class FedRep(LocalAlgorithm):
    """Train the personal head, then the shared representation (Collins et al. 2021, Algorithm 1).

    In every round a client takes its epochs on `local.personal` with the shared values fixed, then the local rule's
    steps on the shared values with the new head fixed.

    Parameters
    ----------
    head_epochs : int
        Epochs on the personal values (τ passes over the client's samples).
    """

    def __init__(self, *, head_epochs: Annotated[int, Field(ge=1, le=10_000)] = 10):
        self.head_epochs = head_epochs

    def refuses(self, config: Config) -> str | None:
        return None if config.local.personal else 'it trains a personal head: set local.personal, as ["output.*"]'

    def train(self, client: Vectors, server: Vectors, steps: Steps, generator: Generator) -> None:
        steps(only="personal", epochs=self.head_epochs)
        steps(only="shared")


@register("local algorithm", name="ditto")
class Ditto(LocalAlgorithm):
    """A personal model per client, pulled towards the global one (Li et al. 2021, Algorithm 1).

    Client k takes the local steps from the global model w as in FedAvg. Then it takes as many steps on its own model,
    v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w)). The models v_k start as the initial model.

    Parameters
    ----------
    lam : float
        λ, weight of the pull.
    """

    client_state = ("v",)
    from_initial = ("v",)

    def __init__(self, *, lam: Annotated[float, Field(ge=0, le=1e6)] = 1.0):
        self.lam = lam

    def train(self, client: Vectors, server: Vectors, steps: Steps, generator: Generator) -> None:
        steps()
        client.v = steps(client.v, towards=server.model, proximal_mu=self.lam)

    def personal_model(self, client: Vectors, server: Vectors, steps: Steps) -> Tensor:
        own: Tensor = client.v
        return own


@register("local algorithm", name="per-fedavg")
class PerFedAvg(LocalAlgorithm):
    """A global model that one gradient step adapts to a client (Fallah et al. 2020, Algorithm 1).

    A local step is w ← w − β (I − α ∇²f(w, D)) ∇f(w − α ∇f(w, D), D'), where D and D' are the halves of a batch and
    β is `local.lr`. If a half has fewer samples than the model needs, such as one with batch norm, the halves overlap.
    Without `hessian`, the factor in brackets is 1 (first-order variant, FO). With it, autograd computes the product
    with the Hessian on D. The paper uses a third batch, and its variant HF a difference of gradients.
    A client is evaluated with the model after one more step of rate α.

    Parameters
    ----------
    alpha : float
        α, rate of the adaptation step.
    hessian : bool
        Include the Hessian.
    """

    def __init__(self, *, alpha: Rate = 0.01, hessian: bool = False):
        self.alpha, self.hessian = alpha, hessian

    def objective(
        self, module: nn.Module, x: Tensor, y: Tensor, client: Vectors, server: Vectors, generator: Generator
    ) -> Tensor:
        half, least = len(y) // 2, min(self.least_batch, len(y))
        first, second = slice(max(half, least)), slice(min(half, len(y) - least), None)
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        loss = self.task_loss(module(x[first]), y[first])
        gradients = torch.autograd.grad(loss, [*named.values()], create_graph=self.hessian, allow_unused=True)
        adapted = {
            name: one if gradient is None else one - self.alpha * gradient
            for (name, one), gradient in zip(named.items(), gradients, strict=True)
        }
        return self.task_loss(torch.func.functional_call(module, adapted, (x[second],)), y[second])

    def personal_model(self, client: Vectors, server: Vectors, steps: Steps) -> Tensor:
        adapted: Tensor = steps(server.model, steps=1, lr=self.alpha)
        return adapted
