"""The page in headless Chromium: everything is drawn without errors and requests, choices redraw, CSV can be saved.

Needs playwright (Python) and a Chromium of the system (`chromium` on the path, or $CHROMIUM); skipped without.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi.report.page import write_report
from tests.report.test_report import SMALL as THREE_ROUNDS
from tests.report.test_report import STRATA

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see .ci/browser")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

SMALL = THREE_ROUNDS | {"rounds": 4}
VIEWED = {"evaluation.clients": "all", "evaluation.fine_tune": 1, "evaluation.clients_every": 2}
MEDIATORS = {"clients.count": 10, "topology.clients_per_mediator": 5}
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that fill every section."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        fedmpi.run("fedavg", SMALL | VIEWED | {"seed": seed}, out=folder / f"plain-{seed}")
    fedmpi.run("fedstas-dp", SMALL | STRATA, out=folder / "strata")
    fedmpi.run("astraea-mediator", SMALL | MEDIATORS, out=folder / "mediators")
    write_report([folder], folder / "report.html", "four <b>runs</b>")
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(chromium: Any, page_file: Path, size: dict[str, int]) -> Iterator[Any]:
    """The page with all figures drawn; in the end, there was no error message and no request to the network."""
    context = chromium.new_context(viewport=size, is_mobile=size is PHONE)
    page, complaints = context.new_page(), []
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: None if asked.url[:5] in ("file:", "data:", "blob:") else complaints.append(asked))
    page.goto(page_file.as_uri())
    page.evaluate("Promise.all(Object.keys(data.figures).map(draw))")
    yield page
    assert complaints == []
    context.close()


def drawn(page: Any, figure: str) -> list[dict[str, Any]]:
    """Label, position and value of the points of a figure."""
    return page.evaluate(
        "(name) => { const found = []; const walk = (item) => { if (item.datum && item.datum.mean !== undefined && "
        "item.mark.marktype === 'symbol') found.push({label: item.datum.label, at: item.datum.at, mean: "
        "item.datum.mean}); (item.items || []).forEach(walk); }; walk(views[name].scenegraph().root); return found; }",
        figure,
    )


def test_every_figure_is_drawn_and_every_section_is_there(chromium: Any, page_file: Path) -> None:
    with opened(chromium, page_file, DESK) as page:
        assert page.locator("h1").inner_text() == "four <b>runs</b>"
        wanted = ["Curves", "Results", "Settings", "Participation", "Clients", "Runs"]
        assert page.locator("main h2").all_inner_texts() == wanted
        for figure in page.locator("figure").all():
            assert figure.locator("canvas").bounding_box()["height"] > 50, figure.get_attribute("id")
        colors = """(id) => {
            const canvas = document.querySelector(`#${id} canvas`), { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
        assert page.evaluate(colors, "curve") > 10 and page.evaluate(colors, "participation") > 2


def test_choices_redraw_the_pointer_shows_values_and_the_legend_chooses(chromium: Any, page_file: Path) -> None:
    with opened(chromium, page_file, DESK) as page:
        held = page.evaluate("data.datasets.runs.filter((one) => one.label === 'fedavg')")
        for key, axis in (("test_accuracy", "round"), ("train_loss", "megabytes")):
            page.select_option("#curve select[name=key]", key)
            page.select_option("#curve select[name=axis]", axis)
            page.evaluate("views.curve.runAsync().then(() => null)")
            points = [one for one in drawn(page, "curve") if one["label"] == "fedavg"]
            for name, values in (("at", [one["x"][axis] for one in held]), ("mean", [one["y"][key] for one in held])):
                assert [one[name] for one in points] == pytest.approx(np.mean(values, axis=0))
        box = page.locator("#curve canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
        page.locator("#vg-tooltip-element.visible").wait_for()
        assert "configuration" in page.locator("#vg-tooltip-element").inner_text()
        place = page.evaluate(
            "(() => { let found; const walk = (item, x, y) => { x += item.x || 0; y += item.y || 0; if (item.text === "
            "'fedavg' && item.mark.role === 'legend-label') found = [x, y]; (item.items || []).forEach((one) => "
            "walk(one, x, y)); }; walk(views.curve.scenegraph().root, 0, 0); const [x, y] = views.curve.origin(); "
            "return { x: found[0] + x + 5, y: found[1] + y }; })()"
        )
        page.locator("#curve canvas").click(position=place)
        assert page.evaluate("views.curve.signal('chosen').label") == ["fedavg"]


def test_a_phone_shows_it_without_scrolling_sideways_or_breaking_words(chromium: Any, page_file: Path) -> None:
    with opened(chromium, page_file, PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        right = "[...document.querySelectorAll('.chart canvas')].map((c) => c.getBoundingClientRect().right)"
        assert 0 < max(page.evaluate(right)) <= 390
        lines = page.evaluate(
            """[...document.querySelectorAll("#evenness td:first-child, #differences td:first-child")].map((cell) => {
                const text = document.createRange();
                text.selectNodeContents(cell);
                return [cell.innerText, new Set([...text.getClientRects()].map((p) => Math.round(p.bottom))).size];
            })"""
        )
        assert lines and not [text for text, count in lines if " " not in text.strip() and count > 2]


def test_single_values_are_drawn(chromium: Any, tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        (folder / "config.toml").write_text(f'preset = "fedsts"\nrounds = 3\nseed = {seed}\n')
        strata = {"stratum_sizes": [3, 2], "allocation": [1, 1]}
        work = [{"round": t, "samples": 9, "seconds": 0.1, "train_loss": 1.0, **strata} for t in range(3)]
        work[2] |= {"test_accuracy": 0.25, "own_number": 1.5}
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in work))
    write_report([tmp_path], tmp_path / "report.html")
    with opened(chromium, tmp_path / "report.html", DESK) as page:
        assert [(one["at"], one["mean"]) for one in drawn(page, "curve")] == [(3, 0.25)]
        page.select_option("#curve select[name=key]", "own_number")
        page.evaluate("views.curve.runAsync().then(() => null)")
        assert [one["mean"] for one in drawn(page, "curve")] == [1.5]


def test_curves_are_saved_as_csv(chromium: Any, page_file: Path) -> None:
    with opened(chromium, page_file, DESK) as page:
        with page.expect_download() as download:
            page.click("#csv")
        rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
        held = page.evaluate(
            "data.datasets.runs.filter((one) => one.label === 'fedavg').map((one) => one.y.test_accuracy)"
        )
        found = [row for row in rows if (row["configuration"], row["key"]) == ("fedavg", "test_accuracy")]
        assert [float(row["value"]) for row in found] == sum(held, [])
        assert [(row["seed"], row["round"]) for row in found] == [(seed, str(t)) for seed in "01" for t in range(1, 5)]
