"""The decorators with which a part says what it is: `@client_sampler`, `@row_rule`, `@weights`, `@combiner`,
`@server_optimizer`. Each works with and without parentheses and leaves the function or class as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, overload

from fedmpi.common.errors import UserError
from fedmpi.common.registry import Chosen, register

NUMBERS = ("loss", "accuracy", "update_norm", "gradient_norm", "seconds")
"""Numbers about clients that the server can keep for a sampler, or have measured of its candidates."""

SERVICES = ("strata", "norms")
"""What else a sampler can need: strata of the clients, or the norms of their gradients."""

MEASURABLE = ("loss", "accuracy", "gradient_norm")
"""Those that a model and a client's samples make, whether it trains or not."""


@overload
def client_sampler(chosen: Chosen, /) -> Chosen: ...
@overload
def client_sampler(
    *, needs: Sequence[str] = (), measures: Sequence[str] = (), name: str | None = None
) -> Callable[[Chosen], Chosen]: ...
def client_sampler(
    chosen: Chosen | None = None, /, *, needs: Sequence[str] = (), measures: Sequence[str] = (), name: str | None = None
) -> Any:
    """Makes a function `(view, *, options) -> Cohort` a choice for `participation.clients`.

    Parameters
    ----------
    needs : sequence of str
        Numbers that the server shall keep of past participations (`NUMBERS`): `view.last(name)`, `view.age(name)`; and
        of `SERVICES`, "strata" or "norms" of the clients' gradients or labels: `view.strata`.
    measures : sequence of str
        Numbers (`NUMBERS`) to be measured on the current model: the part is then a class with `candidates(view)`, the
        clients to measure, and `draw(view)`, which finds them in `view.fresh(name)`. For "update_norm" the candidates
        are trained on trial; "seconds" are those that they would take.
    name : str, optional
        For built-in parts.

    Notes
    -----
    A class has `draw(view)`. What it remembers from round to round it names in `state`, a tuple of its attributes, each
    a NumPy array or a number: these are kept in checkpoints.
    """
    kept = _names_of_numbers(needs, (*NUMBERS, *SERVICES), "needs")
    fresh = _names_of_numbers(measures, NUMBERS, "measures")
    return _decorated("client sampler", chosen, name, needs=kept, measures=fresh)


@overload
def row_rule(chosen: Chosen, /) -> Chosen: ...
@overload
def row_rule(*, pooled: bool = False, name: str | None = None) -> Callable[[Chosen], Chosen]: ...
def row_rule(chosen: Chosen | None = None, /, *, pooled: bool = False, name: str | None = None) -> Any:
    """Makes a function `(client, *, options) -> sorted local rows` a choice for `samples.rule`.

    Parameters
    ----------
    pooled : bool
        Whether the rule is asked once for the samples of all participants, which lie on one axis, client after client:
        the function is then `(pool, *, options) -> sorted positions`, those that it wants of [pool.start, pool.stop)
        (`fedmpi.samples.row_rule.Pool`). It costs the same for a million clients as for ten.
    name : str, optional
        For built-in parts.
    """
    _yes_or_no("row_rule", pooled=pooled)
    return _decorated("row rule", chosen, name, **({"pooled": True} if pooled else {}))


@overload
def weights(chosen: Chosen, /) -> Chosen: ...
@overload
def weights(
    *,
    per_sample: bool | int = False,
    normalised: bool | Callable[[Any], bool] = True,
    averages_models: bool = False,
    name: str | None = None,
) -> Callable[[Chosen], Chosen]: ...
def weights(
    chosen: Chosen | None = None,
    /,
    *,
    per_sample: bool | int = False,
    normalised: bool | Callable[[Any], bool] = True,
    averages_models: bool = False,
    name: str | None = None,
) -> Any:
    """Makes a function `(cohort, sizes (N,), *, options) -> coefficients (m,)` a choice for `aggregation.weights`.

    A class is called in the same way; its method `after(work)`, where it has one, is asked once a client's update is
    there (`fedmpi.aggregation.weights`).

    Parameters
    ----------
    per_sample : bool or 2
        Whether a coefficient is the factor of one sample used, or that of the client's update; 2: that of a pair of
        samples, so that a client counts by the square of the samples used.
    normalised : bool or callable
        Whether the weighted sum is divided by the total weight; a function of the cohort where that depends on it.
    averages_models : bool
        Whether the next model is Σ c_k w_k, the sum of the models, and not w + Σ c_k (w_k − w).
    name : str, optional
        For built-in parts.
    """
    if per_sample != 2:
        _yes_or_no("weights", per_sample=per_sample)
    _yes_or_no("weights", averages_models=averages_models)
    if not callable(normalised):
        _yes_or_no("weights", normalised=normalised)
    marks = {"averages_models": True} if averages_models else {}
    return _decorated("weights", chosen, name, per_sample=per_sample, normalised=normalised, **marks)


@overload
def combiner(chosen: Chosen, /) -> Chosen: ...
@overload
def combiner(*, name: str | None = None) -> Callable[[Chosen], Chosen]: ...
def combiner(chosen: Chosen | None = None, /, *, name: str | None = None) -> Any:
    """Makes a function `(updates (m, s), coefficients (m,), *, options) -> (s,)` a choice for `aggregation.rule`.

    A class may have `combine(updates, coefficients, measured)` instead, and `measure(updates)`, whose results are
    summed over all coordinates before (`fedmpi.aggregation.combiners`).
    """
    return _decorated("combiner", chosen, name)


@overload
def server_optimizer(chosen: Chosen, /) -> Chosen: ...
@overload
def server_optimizer(*, name: str | None = None) -> Callable[[Chosen], Chosen]: ...
def server_optimizer(chosen: Chosen | None = None, /, *, name: str | None = None) -> Any:
    """Makes a function `(w (d,), update (d,), *, options)` a choice for `aggregation.optimizer`: the server's step.

    It changes w in place or returns its next value. A class has this as its method `step`, and names in `state` what it
    remembers (`fedmpi.aggregation.server_optimizers`).
    """
    return _decorated("server optimizer", chosen, name)


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
