"""Decorators that register components, such as `@client_sampler`, `@data_sampler` and `@aggregator`.

Each works with and without parentheses and returns the function or class unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, overload

from fedmpi.common.errors import UserError
from fedmpi.common.registry import Marked, register

NUMBERS = ("loss", "accuracy", "update_norm", "gradient_norm", "seconds")
"""Numbers about clients that the server can keep for a sampler, or measure for its candidates."""

SERVICES = ("strata", "norms")
"""Further requirements of a sampler: strata of the clients, or the norms of their gradients."""

MEASURABLE = ("loss", "accuracy", "gradient_norm")
"""Numbers that depend only on a model and a client's samples, whether it trains or not."""


@overload
def client_sampler(chosen: Marked, /) -> Marked: ...
@overload
def client_sampler(
    *, needs: Sequence[str] = (), measures: Sequence[str] = (), name: str | None = None
) -> Callable[[Marked], Marked]: ...
def client_sampler(
    chosen: Marked | None = None, /, *, needs: Sequence[str] = (), measures: Sequence[str] = (), name: str | None = None
) -> Any:
    """Make a function `(view, *, options) -> Cohort` a choice for `clients.sampler`.

    Parameters
    ----------
    needs : sequence of str
        Numbers of past participations that the server keeps (`NUMBERS`): `view.last(name)`, `view.age(name)`; and of
        `SERVICES`, "strata" or "norms" of the clients' gradients or labels: `view.strata`.
    measures : sequence of str
        Numbers (`NUMBERS`) to be measured on the current model. The component is then a class with `candidates(view)`,
        the clients to measure, and `draw(view)`, which reads the results from `view.fresh(name)`. For "update_norm" the
        candidates are trained on trial; "seconds" is the time that they would take.
    name : str, optional
        Name of a built-in component.

    Notes
    -----
    A class has `draw(view)`. If it keeps values between rounds, it names them in `state`, a tuple of its attributes,
    each a NumPy array or a number. Checkpoints contain them.
    """
    kept = _names_of_numbers(needs, (*NUMBERS, *SERVICES), "needs")
    fresh = _names_of_numbers(measures, NUMBERS, "measures")
    return _decorated("client sampler", chosen, name, needs=kept, measures=fresh)


@overload
def data_sampler(chosen: Marked, /) -> Marked: ...
@overload
def data_sampler(*, pooled: bool = False, name: str | None = None) -> Callable[[Marked], Marked]: ...
def data_sampler(chosen: Marked | None = None, /, *, pooled: bool = False, name: str | None = None) -> Any:
    """Make a function `(client, *, options) -> sorted local rows` a choice for `samples.sampler`.

    Parameters
    ----------
    pooled : bool
        True calls the rule once for the samples of all selected clients, concatenated client after client. The function
        is then `(pool, *, options) -> sorted positions`, the selected ones of [pool.start, pool.stop)
        (`fedmpi.samples.row_rule.Pool`). It costs the same for a million clients as for ten.
    name : str, optional
        Name of a built-in component.
    """
    _yes_or_no("data_sampler", pooled=pooled)
    return _decorated("data sampler", chosen, name, **({"pooled": True} if pooled else {}))


@overload
def weights(chosen: Marked, /) -> Marked: ...
@overload
def weights(
    *,
    per_sample: bool | int = False,
    normalized: bool | Callable[[Any], bool] = True,
    averages_models: bool = False,
    name: str | None = None,
) -> Callable[[Marked], Marked]: ...
def weights(
    chosen: Marked | None = None,
    /,
    *,
    per_sample: bool | int = False,
    normalized: bool | Callable[[Any], bool] = True,
    averages_models: bool = False,
    name: str | None = None,
) -> Any:
    """Make a function `(cohort, sizes (N,), *, options) -> coefficients (m,)` a choice for `server.weights`.

    A class is called in the same way. Its optional method `after(work)` is called when a client's update is available
    (`fedmpi.aggregation.weights`).

    Parameters
    ----------
    per_sample : bool or 2
        True if a coefficient is the factor of one sample used, False if it is that of the client's update. 2: the
        factor of a pair of samples, so that a client counts by the square of the samples used.
    normalized : bool or callable
        True divides the weighted sum by the total weight; a function of the cohort if that depends on the cohort.
    averages_models : bool
        True makes the next model Σ c_k w_k, the sum of the models, instead of w + Σ c_k (w_k − w).
    name : str, optional
        Name of a built-in component.
    """
    if per_sample != 2:
        _yes_or_no("weights", per_sample=per_sample)
    _yes_or_no("weights", averages_models=averages_models)
    if not callable(normalized):
        _yes_or_no("weights", normalized=normalized)
    marks = {"averages_models": True} if averages_models else {}
    return _decorated("weights", chosen, name, per_sample=per_sample, normalized=normalized, **marks)


@overload
def aggregator(chosen: Marked, /) -> Marked: ...
@overload
def aggregator(*, name: str | None = None) -> Callable[[Marked], Marked]: ...
def aggregator(chosen: Marked | None = None, /, *, name: str | None = None) -> Any:
    """Make a function `(updates (m, s), coefficients (m,), *, options) -> (s,)` a choice for `server.aggregator`.

    A class may instead have `combine(updates, coefficients, measured)` and `measure(updates)`, whose results are summed
    over all coordinates first (`fedmpi.aggregation.aggregators`).
    """
    return _decorated("aggregator", chosen, name)


@overload
def server_optimizer(chosen: Marked, /) -> Marked: ...
@overload
def server_optimizer(*, name: str | None = None) -> Callable[[Marked], Marked]: ...
def server_optimizer(chosen: Marked | None = None, /, *, name: str | None = None) -> Any:
    """Make a function `(w (d,), update (d,), *, options)` a choice for `server.optimizer`: the server's step.

    It changes w in place or returns its next value. A class does this in its method `step`, and names the values that
    it keeps in `state` (`fedmpi.aggregation.server_optimizers`).
    """
    return _decorated("server optimizer", chosen, name)


@overload
def availability(chosen: Marked, /) -> Marked: ...
@overload
def availability(*, name: str | None = None) -> Callable[[Marked], Marked]: ...
def availability(chosen: Marked | None = None, /, *, name: str | None = None) -> Any:
    """Make a function `(view, *, options) -> probabilities (N,)` a choice for `clients.availability`."""
    return _decorated("availability", chosen, name)


@overload
def partitioner(chosen: Marked, /) -> Marked: ...
@overload
def partitioner(*, name: str | None = None) -> Callable[[Marked], Marked]: ...
def partitioner(chosen: Marked | None = None, /, *, name: str | None = None) -> Any:
    """Make a function `(labels, clients, generator, *, options) -> owners (n,)` a choice for `--partition`."""
    return _decorated("partition", chosen, name)


def _yes_or_no(decorator: str, **marks: Any) -> None:
    for name, value in marks.items():
        if not isinstance(value, bool):
            raise UserError(f"{decorator}: {name} = {value!r} is neither True nor False")


def _names_of_numbers(wanted: Sequence[str], known: Sequence[str], mark: str) -> tuple[str, ...]:
    listed = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in listed:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"choose of {', '.join(known)}"
            raise UserError(f"client_sampler: {mark} = {name!r} is no number that can be had: {hint}")
    return listed


def _decorated(kind: str, chosen: Any, name: str | None, **marks: Any) -> Any:
    mark = register(kind, name, **marks)
    return mark if chosen is None else mark(chosen)
