"""Figures of a report: specifications in Vega-Lite over the data of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
METHODS = {
    "astraea": "#0072B2",
    "fedavg": "#E69F00",
    "fedstas": "#009E73",
    "fedsampling": "#CC79A7",
    "fedsso": "#D55E00",
    "fedsts": "#56B4E9",
    "fedprox": "#B8A800",
}
"""Color of each method, as in the figures of the documentation; all eyes can distinguish them, on white and black."""
GRAY = "#808080"
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
TEXT = {"labelColor": "#7a8794", "titleColor": "#7a8794"}
COMMON = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": "container",
    "background": "transparent",
    "autosize": {"type": "fit-x", "contains": "padding"},
    "config": {
        "view": {"stroke": None},
        "axis": TEXT | {"gridColor": "#80808040", "labelLimit": 180, "titleFontWeight": "normal"},
        "legend": TEXT | {"orient": "bottom", "columns": 2, "labelLimit": 300, "symbolOpacity": 1},
    },
}


@dataclass(frozen=True)
class Shown:
    """Numbers of the page, as JSON."""

    runs: list[dict[str, Any]]  # Each with its label: runs of one configuration have the same
    metrics: dict[str, str]  # Titles of the keys that have numbers
    axes: dict[str, str]  # Titles of the quantities on the horizontal axis

    @property
    def labels(self) -> list[str]:
        """Names of the configurations."""
        return list(dict.fromkeys(run["label"] for run in self.runs))

    @property
    def several_seeds(self) -> bool:
        """True if a configuration has several seeds."""
        return len(self.runs) > len(self.labels)

    def having(self, part: str) -> list[dict[str, Any]]:
        """Return the runs that have these numbers."""
        return [run for run in self.runs if part in run]


def styles(labels: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Return color and dashes of each configuration; a method always has the same color."""
    methods = [next((name for name in METHODS if label.lower().startswith(name)), "") for label in labels]
    free = [color for name, color in METHODS.items() if name not in methods] + [GRAY]
    others = iter(free * len(labels))
    colors = [METHODS[name] if name else next(others) for name in methods]
    return colors, [DASHES[colors[:place].count(color) % len(DASHES)] for place, color in enumerate(colors)]


def _calculate(**expressions: str) -> list[Spec]:
    return [{"calculate": expression, "as": name} for name, expression in expressions.items()]


def _choice(name: str, title: str, options: Mapping[Any, str]) -> Spec:
    """Return a parameter that the reader chooses above the figure."""
    bind = {"input": "select", "options": list(options), "labels": list(options.values()), "name": f"{title} "}
    return {"name": name, "value": next(iter(options)), **({"bind": bind} if len(options) > 1 else {})}


def _chosen_title(name: str, options: Mapping[Any, str]) -> Spec:
    """Return the title of an axis that shows the reader's choice."""
    return {"signal": f"{json.dumps(options)}[{name}]"}


def lines(shown: Shown, keys: Sequence[str], height: int) -> Spec:
    """Return a figure of some numbers over the run, with a choice of the number and of the horizontal axis.

    Lines are means over seeds, bands the standard deviation. The legend selects lines, the pointer shows values.
    """
    options, several = {key: shown.metrics[key] for key in keys}, shown.several_seeds
    aggregate = [
        ("mean", "value", "mean"),
        ("stdev", "value", "deviation"),
        ("count", "value", "n"),
        ("mean", "spent", "at"),
    ]
    transform = [
        *_calculate(value="datum.y[key] || []", spent="datum.x[axis] || []", round="datum.x.round"),
        {"flatten": ["value", "spent", "round"]},
        {"filter": "isValid(datum.value) && isValid(datum.spent)"},
        {
            "aggregate": [dict(zip(("op", "field", "as"), one, strict=True)) for one in aggregate],
            "groupby": ["label", "round"],
        },
        *_calculate(low="datum.mean - (datum.deviation || 0)", high="datum.mean + (datum.deviation || 0)"),
    ]
    whole = "datum.value === floor(datum.value) ? format(datum.value, ',') : ''"
    ticks = {"grid": False, "labelExpr": f"axis === 'round' ? ({whole}) : datum.label"}
    x = {"field": "at", "type": "quantitative", "title": _chosen_title("axis", shown.axes), "axis": ticks}
    x["scale"] = {"zero": False, "nice": False}
    y = {"field": "mean", "type": "quantitative", "title": _chosen_title("key", options), "scale": {"zero": False}}
    colors, dashes = styles(shown.labels)
    color = {"field": "label", "type": "nominal", "title": None, "scale": {"domain": shown.labels, "range": colors}}
    place = {"x": x, "y": y, "color": color}
    dash = color | {"scale": {"domain": shown.labels, "range": dashes}}

    def faint(least: float, most: float) -> Spec:
        return {"condition": {"param": "chosen", "value": most}, "value": least}

    edges = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    band = {"mark": "area", "encoding": place | edges | {"opacity": faint(0.03, 0.17)}}
    line = {"mark": "line", "encoding": place | {"strokeDash": dash, "opacity": faint(0.15, 1)}}
    visible = [{"param": "near", "empty": False, "value": 1}, {"test": "datum.points === 1", "value": 1}]
    tooltip = [{"field": "label", "title": "configuration"}, {"field": "at", "format": ".5~g"}]
    tooltip += [{"field": "mean", "title": "value", "format": ".5~g"}]
    tooltip += [{"field": "deviation", "format": ".5~g"}, {"field": "n", "title": "seeds"}] * several
    near = {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"}
    points = {
        "transform": [{"joinaggregate": [{"op": "count", "as": "points"}], "groupby": ["label"]}],
        "params": [{"name": "near", "select": near}],
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": place | {"tooltip": tooltip, "opacity": {"condition": visible, "value": 0}},
    }
    layers: list[Spec] = [*([band] if several else []), line, points]
    layers[0]["params"] = [{"name": "chosen", "select": {"type": "point", "fields": ["label"]}, "bind": "legend"}]
    params = [_choice("key", "show", options), _choice("axis", "against", shown.axes)]
    return {"data": {"name": "runs"}, "params": params, "transform": transform, "layer": layers, "height": height}


def heat_map(runs: list[dict[str, Any]], part: str, row: str, title: str) -> Spec:
    """Return a heat map of one run: the shares of its `part` by round and row."""
    names = {run["number"]: f"{run['label']}, seed {run['seed']} ({run['name']})" for run in runs}
    rows, rounds = f"datum.{part}.rows", f"datum.{part}.rounds"
    cells = [
        *_calculate(line=f"datum.{part}.share", first=f"slice({rows}, 0, -1)", end=f"slice({rows}, 1)"),
        {"flatten": ["line", "first", "end"]},
        *_calculate(round=f"slice({rounds}, 0, -1)", next=f"slice({rounds}, 1)"),
        {"flatten": ["line", "round", "next"], "as": ["share", "round", "next"]},
        {"filter": "isValid(datum.share)"},
        *_calculate(left="datum.round - 0.5", right="datum.next - 0.5", last="datum.end - 1"),
        *_calculate(top="datum.first - 0.5", bottom="datum.end - 0.5"),
        *_calculate(state="datum.share ? 'selected' : 'not selected'"),
    ]
    color: Spec = {"field": "share", "type": "quantitative", "title": title}
    color |= {"scale": {"scheme": "viridis", "domain": [0, 1]}}
    color |= {"legend": {"gradientLength": 180, "direction": "horizontal"}}
    if all(run[part].get("binary") for run in runs):
        scale = {"domain": ["selected", "not selected"], "range": [METHODS["astraea"], "#dde2e8"]}
        color = {"field": "state", "type": "nominal", "title": None, "scale": scale}
    axis = {"type": "quantitative", "axis": {"grid": False, "tickMinStep": 1}}
    whole = {"zero": False, "nice": False}
    return {
        "data": {"name": "runs"},
        "params": [_choice("run", "run", names)],
        "transform": [{"filter": "datum.number === run"}, *cells],
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {"field": "left", "title": "round", "scale": whole, **axis},
            "x2": {"field": "right"},
            "y": {"field": "top", "title": row, "scale": whole | {"reverse": True}, **axis},
            "y2": {"field": "bottom"},
            "color": color,
            "tooltip": [
                {"field": "round"},
                {"field": "first", "title": f"first {row}"},
                {"field": "last", "title": f"last {row}"},
                {"field": "share", "format": ".3~g"},
            ],
        },
        "height": 300,
    }
