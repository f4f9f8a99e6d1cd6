"""Algorithms of local work that keep state: the base class of SCAFFOLD, FedDyn, FedNova and of your own.

An algorithm may change a client's gradients by a constant vector and a proximal pull, keep vectors of every client and
of the server between rounds, sum further vectors over the participants beside their updates, and change the update
before the server optimizer gets it. Steps, batches, weights and sums stay those of fedmpi.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedmpi.common.calling import is_complex
from fedmpi.common.later import Later
from fedmpi.common.made_with import noting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedmpi.config import Config
else:
    torch = Later("torch")


@dataclass(frozen=True)
class Work:
    """What a client did in a round.

    Attributes
    ----------
    delta : Tensor (d,)
        w_k − w, what its local steps changed; float buffers such as batch norm's statistics come last. Read-only: a
        `finish` that changes it in place fails.
    steps : int
        Local steps that it took.
    lr : float
        Their learning rate.
    coefficient : float
        What its update enters the sum with; divided by `Totals.divisor` it is its share of the mean.
    proximal_mu : float
        μ of the proximal pull.
    samples : int
        Rows that it trained on, each counted once.
    """

    delta: Tensor
    steps: int
    lr: float
    coefficient: float
    proximal_mu: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class Totals:
    """What the server knows of a round when it steps.

    Attributes
    ----------
    population : int
        N, all clients.
    participants : int
        m, the clients whose updates were summed.
    weight : float
        Σ coefficient over them; of weights with `after`, Σ of the shares that it returned.
    divisor : float
        What the weighted sum was divided by to make the update: `weight`, or 1 for weights that are not normalised.
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
    """Local work with state: subclass it and override what you need; everything is optional.

    The keyword-only parameters of the constructor are options, set in the configuration beside `local.algorithm`.

    Attributes
    ----------
    client_state : tuple of str
        Vectors (d,) that are kept for every client that has taken part, zero before: `client.NAME`.
    server_state : tuple of str
        Vectors (d,) that every rank holds alike, zero at first: `server.NAME`.
    sums : tuple of str
        Vectors that `finish` returns by name, summed over the participants.
    numbers : tuple of str
        Numbers that `finish` returns by name, summed likewise.
    sent : tuple of str or None
        The server's vectors that clients receive with the model, and their hooks may read; None = all of them.
    proximal_mu : float
        μ of a proximal pull μ (w − w_start) that is added to every local gradient, beside that of `local.proximal_mu`.
    objective : None or method
        `objective(self, module, x, y, client, server)` returns the loss of a batch in place of the task's; its gradient
        is taken through `module`. Clients are then trained one at a time.
    counts_once : bool
        Whether a cohort in which a client counts more than once is refused.
    """

    __fedmpi__: ClassVar[dict[str, Any]] = {"kind": "local algorithm"}
    client_state: ClassVar[Sequence[str]] = ()
    server_state: ClassVar[Sequence[str]] = ()
    sums: ClassVar[Sequence[str]] = ()
    numbers: ClassVar[Sequence[str]] = ()
    sent: ClassVar[Sequence[str] | None] = None
    proximal_mu: float = 0.0
    objective: Callable[..., Tensor] | None = None
    counts_once: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        noting(cls)

    def refuses(self, config: Config) -> str | None:
        """Why the algorithm means nothing with the rest of this configuration, and what to do; None where it does."""
        return None

    def correction(self, client: Vectors, server: Vectors) -> Tensor | None:
        """A vector (d,) that is added to every gradient of the client's local steps in this round; None = nothing.

        It is the gradient of a linear term ⟨correction, w⟩ of the local objective.
        """
        return None

    def finish(self, client: Vectors, server: Vectors, work: Work) -> Mapping[str, Any] | None:
        """After a client's local steps: set its state; return what `sums` and `numbers` name."""
        return None

    def server_step(self, server: Vectors, update: Tensor, sums: Mapping[str, Any], totals: Totals) -> Tensor | None:
        """Once a round, on every rank alike: set the server's state; return the update that the optimizer gets.

        Parameters
        ----------
        server : Vectors
        update : Tensor (d,)
            The weighted mean of w_k − w (the sum, for weights that are not normalised), or what `aggregation.rule`
            makes of them.
        sums : mapping of str to Tensor (d,) or float
            What `finish` returned, summed over the participants.
        totals : Totals

        Returns
        -------
        Tensor (d,) or None
            None = `update` as it is. Float buffers, such as batch norm's statistics, keep their weighted mean.
        """
        return update


def misnamed(algorithm: LocalAlgorithm) -> dict[str, str]:
    """Attributes of an algorithm of one's own that nothing reads, by name, with the one that was probably meant.

    They are those that `LocalAlgorithm` does not have, though one that it has is called almost so. Options and what
    begins with an underscore are the algorithm's own affair.
    """
    known = [name for name in dir(LocalAlgorithm) if not name.startswith("_")]
    own = {name for name in dir(algorithm) if not name.startswith("_")} - {
        *known,
        *signature(type(algorithm)).parameters,
    }
    near = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in sorted(own)}
    return {name: found[0] for name, found in near.items() if found}


class Vectors:
    """Named vectors (d,) as attributes: the state of a client, or of the server.

    Parameters
    ----------
    owner : str
        "client" or "server", for messages.
    vectors : dict of str to Tensor (d,)
        Replaced when an attribute is set.
    facts : dict
        Further attributes, which may only be read.
    closed : str, optional
        Why vectors may not be set here.
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

    def __dir__(self) -> list[str]:
        return [*self._vectors, *self._facts]

    def __repr__(self) -> str:
        return f"<{self._owner}: {', '.join(dir(self))}>"

    def _listed(self) -> str:
        kept = ", ".join(self._vectors) or "nothing"
        known = f"; it also knows {', '.join(self._facts)}" if self._facts else ""
        return f"{self._owner}_state declares {kept}{known}"


def vector_like(kept: Tensor, value: Any, what: str) -> Tensor:
    """A value as a vector of the length, type and device of `kept`; numbers fill all of it.

    Raises
    ------
    TypeError, ValueError
        The value is no tensor, array or number, or has another length.
    """
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
