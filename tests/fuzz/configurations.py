"""Configurations drawn from the model of the configuration itself: every key, at and beyond its bounds."""

from __future__ import annotations

import datetime
import math
import tomllib
import types
import typing
from functools import cache
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

import fedmpi
from fedmpi import Config, UserError, components, presets
from fedmpi.common.registry import KINDS
from fedmpi.config import build_config, config_toml
from fedmpi.config.writing import flat_table
from tests.fuzz.verdict import REFUSED, Finding, outcome

Case = tuple[str | None, dict[str, Any]]

WHOLE = [-(2**63), -1, 0, 1, 2, 3, 7, 100, 1000, 10**6, 2**31, 2**53, 2**63, 2**64, 10**12, 10**5000]
REAL = [-1.0, 0.0, 5e-324, 1e-300, 1e-38, 1e-30, 1e-6, 0.1, 0.5, 1 - 1e-16, 1.0, 1.5, 2.0, 50.0, 1e6, 1e18, 1e30, 1e38]
REAL += [1e300, 1e308, math.inf, -math.inf, math.nan]
TEXTS = [
    "",
    " ",
    "auto",
    "digits",
    "all",
    "none",
    "a:b",
    ":",
    "..:x",
    "os:sep",
    "x\ny",
    "\0",
    "é",
    "x" * 5000,
    "cuda:99",
]
ODD = [True, False, None, [], {}, [1, 2], [0.5] * 3, {"a": {"b": 1}}, datetime.date(2020, 1, 1), *TEXTS]
MOST_WORK = 50
"""Rounds times local passes times visits of a run that is tried."""


def fields() -> dict[str, Any]:
    """Every key and the type of its values."""
    found: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, BaseModel):
            found |= {f"{name}.{key}": inner.annotation for key, inner in part.model_fields.items()}
        else:
            found[name] = part
    for part in components():
        table = KINDS[part.kind].table
        if table in Config.model_fields and not KINDS[part.kind].late:
            for option in part.options:
                found.setdefault(f"{table}.{option.name}", option.annotation)
    return found


def choices() -> dict[str, list[str]]:
    """The keys that choose a part, and the names of those built in."""
    found: dict[str, list[str]] = {}
    for part in components():
        found.setdefault(KINDS[part.kind].key, []).append(part.name)
    return {key: names for key, names in found.items() if key.partition(".")[0] in Config.model_fields}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a type: all that it names, or numbers at the ends of what floats and integers are."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values(inner[0])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(one) for one in inner if one is not type(None)))
    if origin in (tuple, list) or getattr(origin, "__name__", "") == "Sequence":
        return st.lists(values(inner[0]), max_size=4)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.sampled_from(WHOLE) | st.integers(1, 12)
    if annotation is float:
        return st.sampled_from(REAL) | st.floats(0.01, 2)
    return st.sampled_from(ODD)


FIELDS, CHOICES = fields(), choices()
FIELD_VALUES = flat_table(build_config([("x", {"preset": "fedavg"})]))


@st.composite
def _setting(draw: st.DrawFn) -> tuple[str, Any]:
    if draw(st.integers(0, 3)) == 0:
        key = draw(st.sampled_from(sorted(CHOICES)))
        return key, draw(st.sampled_from(CHOICES[key]))
    key = draw(st.sampled_from(sorted(FIELDS)))
    odd = draw(st.integers(0, 9)) == 0
    return key, draw(st.sampled_from([*ODD, *WHOLE, *REAL]) if odd else values(FIELDS[key]))


def strategy() -> st.SearchStrategy[Case]:
    """One key at a bound where it means something; or a preset, or none, and one to four keys over it."""
    return bounded() | st.tuples(
        st.none() | st.sampled_from([preset.name for preset in presets()]),
        st.lists(_setting(), min_size=1, max_size=4).map(dict),
    )


CONTEXTS: list[dict[str, Any]] = [
    *({key: name} for key, names in CHOICES.items() for name in names),
    {"samples.sampler": "bernoulli", "samples.budget": 50, "samples.size.estimate": "randomized-response"},
    {"samples.sampler": "ratio", "samples.sampler.ratio": 0.5},
    {"devices": True, "devices.speed": "lognormal", "clients.over_selection": 1.5},
    {"devices": True, "devices.speed": "classes", "devices.speed.rates": [1, 2], "devices.speed.shares": [0.5, 0.5]},
    {"privacy.clip_norm": 1.0, "server.weights": "uniform", "privacy.noise_multiplier": 1.0},
    {"compression": "top-k"},
    {"compression": "int8", "compression.error_feedback": True},
    {"rebalance": True},
    {"local.schedule": "step"},
    {"local.optimizer": "adam"},
    {"local.algorithm": "feddyn", "server.weights": "uniform"},
    {"local.steps": 3},
    {"clients.sampler": "stratified", "server.weights": "stratified", "clients.sampler.within_stratum": "uniform"},
    {"clients.sampler": "stratified", "clients.sampler.clustering": "optics", "server.weights": "normalized"},
    {"topology": "mediators", "local.optimizer": "adam"},
    {"attack": "sign-flip"},
    {"attack": "noise"},
    {
        "clients.availability": "time-of-day",
        "clients.availability.probability": 0.9,
        "clients.availability.lowest": 0.5,
    },
    {"clients.availability": "label-group", "clients.availability.by_label": [0.5, 0.9]},
    {"logging.diagnostics": True},
]


@cache
def contexts_of(key: str) -> tuple[Case, ...]:
    """Configurations in which a key means something: of the first three."""
    found: list[Case] = []
    for context in CONTEXTS:
        base = {"clients.count": 3, **context}
        if base.get("clients.sampler") == "all":
            del base["clients.count"]
        for value in (FIELD_VALUES.get(key), 1, 0.5, "auto"):
            if key in base or _builds((None, base | {key: value})):
                if key in base and not _builds((None, base)):
                    continue
                found.append((None, base))
                break
        if len(found) == 3:
            break
    return tuple(found)


def _builds(case: Case) -> bool:
    try:
        return bool(_built(case))
    except UserError:
        return False


@st.composite
def bounded(draw: st.DrawFn) -> Case:
    """One key, in a configuration where it means something, at any value of its type."""
    key = draw(st.sampled_from(sorted(FIELDS)))
    context = draw(st.sampled_from(contexts_of(key) or ((None, {}),)))
    odd = draw(st.integers(0, 9)) == 0
    value = draw(st.sampled_from([*ODD, *WHOLE, *REAL]) if odd else values(FIELDS[key]))
    return context[0], context[1] | {key: value}


def attempt(case: Case) -> str:
    """Refused, or a configuration that can be written, read again, and run where that is short."""
    config = outcome(lambda: _built(case))
    if isinstance(config, str):
        return config
    again = outcome(lambda: build_config([("again", tomllib.loads(config_toml(config)))]))
    if again != config:
        raise Finding("the configuration as it is written is another one")
    if not _short(config):
        return "only read"
    run = outcome(lambda: fedmpi.run(config))
    if isinstance(run, str):
        return REFUSED
    if not all(bool(value.isfinite().all()) for value in run.model.state_dict().values()):
        raise Finding("the run is finished, but its model is not finite")
    return "run"


def _built(case: Case) -> Config:
    preset, settings = case
    base = {"data.source": "digits:clients=6", "model.hidden": [4], "logging.tensorboard": False, "rounds": 2}
    if settings.get("model.name", "mlp") != "mlp":
        del base["model.hidden"]
    if preset is not None:
        base |= {"preset": preset}
    return build_config([("the test", _nested(base | {"model.name": "mlp"} | settings))])


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in flat.items():
        part, dot, name = key.partition(".")
        if dot:
            table.setdefault(part, {})[name] = value
        else:
            table[part] = value
    return table


def _short(config: Config) -> bool:
    passes = max(config.local.epochs or 1, (config.local.steps or 1) // 5)
    work = config.rounds * passes * config.topology.epochs
    units = [value for value in (config.model.options.get("hidden") or []) if isinstance(value, int)]
    return work <= MOST_WORK and config.model.name == "mlp" and max(units, default=0) <= 1000 and len(units) < 5
