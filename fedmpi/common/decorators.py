"""Decorators that register components, such as `@client_sampler`, `@data_sampler` and `@aggregator`.

Each works with and without parentheses and returns the function or class unchanged. `name` is for built-in components.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, overload

from fedmpi.common.errors import UserError
from fedmpi.common.registry import Marked, register

HELD_OUT = ("val_loss", "val_accuracy")
"""Numbers of a client's held-out samples."""

MEASURABLE = ("loss", "loss_rms", "accuracy", "gradient_norm", *HELD_OUT)
"""Numbers that depend only on a model and a client's samples, whether it trains or not."""

VECTORS = ("update_sketch", "head_update")
"""Vectors of float32 per client: a sketch of its update, or the update of some layers."""

UPDATES = ("update_norm", *VECTORS)
"""Numbers and vectors of the update that the server receives from a client."""

NUMBERS = (*MEASURABLE, *UPDATES, "seconds")
"""Numbers and vectors about clients that the server can keep for a sampler, or measure for its candidates."""

TRANSFERS = ("download_seconds", "upload_seconds")
"""Parts of the seconds that a candidate would take."""

SAMPLE_NUMBERS = ("sample_loss", "sample_gradient_norm")
"""Numbers of a client's samples under the current global model, for data samplers."""

SERVICES = ("strata", "norms", "history")
"""Further requirements of a sampler: strata of the clients, the norms of their gradients, or the past rounds."""


class Decorator(Protocol):
    """Decorator with and without parentheses."""

    @overload
    def __call__(self, chosen: Marked, /) -> Marked: ...
    @overload
    def __call__(self, *, name: str | None = None, **marks: Any) -> Callable[[Marked], Marked]: ...


def _registers(kind: str) -> Callable[[Callable[..., dict[str, Any]]], Decorator]:
    """Return a decorator of a function that returns marks: it becomes the decorator of components of a kind."""

    def made(marks_of: Callable[..., dict[str, Any]]) -> Decorator:
        @wraps(marks_of)
        def decorate(chosen: Any = None, /, *, name: str | None = None, **marks: Any) -> Any:
            mark = register(kind, name, **marks_of(**marks))
            return mark if chosen is None else mark(chosen)

        return decorate

    return made


@_registers("client sampler")
def client_sampler(*, needs: Sequence[str] = (), measures: Sequence[str] = ()) -> dict[str, Any]:
    """Make a function `(view, *, options) -> Cohort` a choice for `clients.sampler`.

    Parameters
    ----------
    needs : sequence of str
        Values that the server keeps. `NUMBERS` of past participations are in `view.last(name)` and `view.age(name)`,
        "strata" or "norms" of the clients' gradients or labels in `view.strata`, and the past rounds ("history") in
        `view.history`.
    measures : sequence of str
        Numbers (`NUMBERS`) to be measured on the current model. The component is then a class with `candidates(view)`,
        the clients to measure, and `draw(view)`, which reads the results from `view.fresh(name)`. "seconds" is the time
        that the candidates would take, including their `TRANSFERS`. For numbers of updates (`UPDATES`) the candidates
        train once, and send the update that they would send if selected.

    Notes
    -----
    fedmpi reads two options of a sampler: `sketch_size`, the length of an "update_sketch" (default 64), and `layers`, a
    tuple of patterns such as "fc.*" for the parameters of a "head_update" (default: the output layer).

    A class has `draw(view)`. If it keeps values between rounds, it names them in `state`, a tuple of its attributes,
    each a NumPy array or a number. Checkpoints contain them.
    """
    kept = _known("needs", needs, (*NUMBERS, *SERVICES))
    return {"needs": kept, "measures": _known("measures", measures, (*NUMBERS, *TRANSFERS))}


@_registers("data sampler")
def data_sampler(*, pooled: bool = False, probability: str = "budget", needs: Sequence[str] = ()) -> dict[str, Any]:
    """Make a function `(client, *, options) -> sorted local rows` a choice for `samples.sampler`.

    Parameters
    ----------
    pooled : bool
        True calls the rule once for the samples of all selected clients, concatenated client after client. The function
        is then `(pool, *, options) -> sorted positions`, the selected ones of [pool.start, pool.stop)
        (`fedmpi.samples.rules.Pool`). It costs the same for a million clients as for ten.
    probability : str
        Probability with which a pooled rule uses a sample. all: 1; budget: K over the samples of the available clients;
        estimate: K over the estimate of their number; cohort: K over the samples of the selected clients; ratio: the
        rule's option of this name.
    needs : sequence of str
        Numbers of the client's samples under the current global model in evaluation mode, read from
        `client.fresh(name)`. "sample_loss": the loss of each sample; "sample_gradient_norm": the norm of the gradient
        of this loss with respect to the model's outputs (Katharopoulos & Fleuret 2018). Not for pooled rules.
    """
    needed = _known("needs", needs, SAMPLE_NUMBERS, "data_sampler")
    if pooled and needed:
        raise UserError("data_sampler: pooled data samplers cannot have needs. Leave out pooled or needs")
    if pooled:
        return {"pooled": True, "probability": probability}
    return {"needs": needed} if needed else {}


@_registers("weights")
def weights(
    *, per_sample: bool | int = False, normalized: bool = True, averages_models: bool = False, opening: str = ""
) -> dict[str, Any]:
    """Make a function `(cohort, sizes (N,), *, options) -> coefficients (m,)` a choice for `server.weights`.

    A class is called in the same way. Its optional method `after(work)` is called when a client's update is available,
    and it may keep values between rounds in `state` (`fedmpi.aggregation.weights`).

    Parameters
    ----------
    per_sample : bool or 2
        True if a coefficient is the factor of one sample used, False if it is that of the client's update. 2: the
        factor of a pair of samples, so that a client counts by the square of the samples used.
    normalized : bool
        True divides the weighted sum by the total weight.
    averages_models : bool
        True makes the next model Σ c_k w_k, the sum of the models, instead of w + Σ c_k (w_k − w).
    opening : str
        Weights of an initial step of all clients, if these do not fit it: the name of other ones.
    """
    marks: dict[str, Any] = {"per_sample": per_sample, "normalized": normalized, "opening": opening}
    return marks | ({"averages_models": True} if averages_models else {})


@_registers("aggregator")
def aggregator() -> dict[str, Any]:
    """Make a function `(updates (m, s), coefficients (m,), *, options) -> (s,)` a choice for `server.aggregator`.

    A class may instead have `combine(updates, coefficients, measured)` and `measure(updates)`, whose results are summed
    over all coordinates first. A parameter `clients` gets the clients of the updates, int64 (m,). A class may keep
    values between rounds in `state` (`fedmpi.aggregation.aggregators`).
    """
    return {}


@_registers("server optimizer")
def server_optimizer() -> dict[str, Any]:
    """Make a function `(w (d,), update (d,), *, options)` a choice for `server.optimizer`: the server's step.

    It changes w in place or returns its next value. A class does this in its method `step`, and names the values that
    it keeps in `state` (`fedmpi.aggregation.server_optimizers`).
    """
    return {}


@_registers("compressor")
def compressor(*, bits: float | Callable[..., int] = 32) -> dict[str, Any]:
    """Make a function `(update (d,), generator, *, options)` a choice for `compression`: what arrives of an update.

    It changes the update in place or returns what arrives. Its option `error_feedback` needs no code.

    Parameters
    ----------
    bits : float or callable
        Bits per value that a client sends, or a function `(d, *, options) -> bits` of a whole update.
    """
    return {"bits": bits, "needs": ("residuals",)}


@_registers("feature")
def features(*, needs: str = "gradient") -> dict[str, Any]:
    """Make a function `(gradients (k, d) or class counts (k, C), *, options) -> (k, f)` a choice for client features.

    The key is `clients.sampler.features`. The function is called for blocks of k clients, and the vector of a client
    depends on its own row only. A keyword-only parameter `lr` receives the local learning rate of round 0.

    Parameters
    ----------
    needs : str
        gradient: gradients (k, d) float32 of the current model (option `probe`: the data that they use); labels: class
        counts (k, C) int64.
    """
    return {"needs": _known("needs", needs, ("gradient", "labels"), "features")}


@_registers("availability")
def availability() -> dict[str, Any]:
    """Make a function `(view, *, options) -> probabilities (N,)` a choice for `clients.availability`."""
    return {}


@_registers("partition")
def partitioner() -> dict[str, Any]:
    """Make a function `(labels, clients, generator, *, options) -> owners (n,)` a choice for `--partition`."""
    return {}


def _known(
    mark: str, wanted: Sequence[str], known: Sequence[str], decorator: str = "client_sampler"
) -> tuple[str, ...]:
    listed = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in listed:
        if name not in known:
            raise UserError(f"{decorator}: {mark} = {name!r} is unknown. Choose from {', '.join(known)}")
    return listed
