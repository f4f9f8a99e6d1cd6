"""The page in headless Chromium: everything is drawn, nothing is complained of or asked for, tables sort, files come.

Needs playwright (Python) and a Chromium of the system (`chromium` on the path, or $CHROMIUM); skipped without.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see .ci/browser")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

SMALL: dict[str, Any] = {
    "rounds": 4,
    "logging.participants": True,
    "logging.tensorboard": False,
    "cluster.threads": 1,
    "checkpoint.every": 0,
}
VIEWED = {"evaluation.clients": "all", "evaluation.fine_tune": 1, "evaluation.clients_every": 2}
STRATA = {"participation.strata": 4, "participation.count": 5}
MEDIATORS = {"participation.count": 10, "topology.clients_per_mediator": 5}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that fill every section but the balance of the ranks."""
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


@pytest.fixture(scope="module")
def page(chromium: Any, page_file: Path) -> Iterator[Any]:
    """The page on a desk, all figures drawn; in the end nothing was complained of, nobody was asked for anything."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page, complaints = opened(context, page_file)
    draw_all(page)
    yield page
    assert complaints == []
    context.close()


def opened(context: Any, page_file: Path) -> tuple[Any, list[str]]:
    """The page in a browser's context, and what it complains of or asks others for."""
    page, complaints = context.new_page(), []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(("file:", "data:", "blob:")) else complaints.append(asked.url),
    )
    page.goto(page_file.as_uri())
    return page, complaints


def draw_all(page: Any) -> None:
    page.evaluate("Promise.all(figures.map((figure) => figure.draw()))")


def column(page: Any, table: str, number: int) -> list[str]:
    cells = page.locator(f"#{table} tbody tr td:nth-child({number})").all_inner_texts()
    return [cell.strip() for cell in cells]


def test_every_figure_is_drawn_when_it_comes_into_sight(page: Any) -> None:
    assert page.locator("h1").inner_text() == "four <b>runs</b>"
    sections = page.locator("main h2").all_inner_texts()
    assert {"Results", "Curves", "Who took part", "Strata", "Size estimates", "Mediators", "Privacy spent"} <= set(
        sections
    )
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
        assert figure.locator("canvas").count() == 1, figure.get_attribute("id")
        assert figure.locator("canvas").bounding_box()["height"] > 50
    colours = """(id) => {
        const canvas = document.querySelector(`#${id} canvas`), { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        return new Set(new Uint32Array(data.buffer)).size;
    }"""
    assert page.evaluate(colours, "curve") > 10 and page.evaluate(colours, "participation") > 2


def test_tables_sort_up_and_down(page: Any) -> None:
    head = page.locator("#runs th", has_text="rounds").first
    names = column(page, "runs", 1)
    first = page.locator("#runs th").first
    first.locator("button").click()
    assert first.get_attribute("aria-sort") == "ascending" and column(page, "runs", 1) == sorted(names)
    first.locator("button").click()
    assert column(page, "runs", 1) == sorted(names, reverse=True)
    accuracy = page.locator("#results th", has_text="test accuracy").first
    accuracy.locator("button").click()
    assert accuracy.get_attribute("aria-sort") == "descending" and first.get_attribute("aria-sort") is not None
    values = [float(cell.split(" ")[0]) for cell in column(page, "results", 2)]
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") is None


def test_choices_redraw_and_hidden_configurations_are_left_out(page: Any) -> None:
    rows = "((figure) => figure.rows(figure.state))(figures.find((figure) => figure.name === 'curve'))"
    megabytes = page.evaluate("configurations[labels.indexOf('fedavg')].x.megabytes")
    page.select_option("#curve select[name=axis]", "megabytes")
    drawn = page.evaluate(rows)
    assert [row["x"] for row in drawn if row["configuration"] == "fedavg"] == megabytes
    chip = page.locator("#legend .chip", has_text="fedavg")
    chip.click()
    assert {row["configuration"] for row in page.evaluate(rows)} == {"fedstas-dp", "astraea-mediator"}
    chip.click()
    assert len(page.evaluate(rows)) == len(drawn)


def test_dark_and_light_are_the_systems_and_then_ones_own(chromium: Any, page_file: Path) -> None:
    page, complaints = opened(chromium.new_context(color_scheme="dark"), page_file)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.locator("#theme").click()
    light = page.evaluate(background)
    assert sum(map(int, dark[4:-1].split(","))) < 150 < 600 < sum(map(int, light[4:-1].split(",")))
    assert page.evaluate("colour(0)") == "#0072B2"
    assert complaints == []
    page.context.close()


def test_a_phone_shows_it_without_scrolling_sideways(chromium: Any, page_file: Path) -> None:
    page, complaints = opened(chromium.new_context(viewport={"width": 390, "height": 844}, is_mobile=True), page_file)
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.evaluate(
        "[...document.querySelectorAll('.chart canvas')].map((c) => c.getBoundingClientRect().right)"
    )
    assert widths and max(widths) <= 390
    assert complaints == []
    page.context.close()


def test_a_phone_breaks_no_word_of_the_first_column_into_pieces(chromium: Any, page_file: Path) -> None:
    page, _ = opened(chromium.new_context(viewport={"width": 390, "height": 844}, is_mobile=True), page_file)
    lines = page.evaluate(
        """[...document.querySelectorAll("#evenness td:first-child, #differences .tall td:first-child")].map((cell) => {
            const text = document.createRange();
            text.selectNodeContents(cell);
            return [cell.innerText, new Set([...text.getClientRects()].map((part) => Math.round(part.bottom))).size];
        })"""
    )
    assert lines and not [text for text, count in lines if " " not in text.strip() and count > 2], "44 % of the width"
    page.context.close()


def test_single_and_constant_values_few_strata_and_low_bands_are_drawn_as_they_are(
    chromium: Any, tmp_path: Path
) -> None:
    """One evaluation is a point, a constant has its own value beside it, ticks are at whole strata and rounds."""
    for seed in (0, 1):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        (folder / "config.toml").write_text(f'preset = "fedsts"\nrounds = 3\nseed = {seed}\n')
        work = [
            {
                "round": t,
                "samples": 9,
                "seconds": 0.1,
                "train_loss": 1.0,
                "lr": 0.05,
                "stratum_sizes": [3, 2],
                "allocation": [1, 1],
            }
            for t in range(3)
        ]
        work[2] |= {"test_accuracy": 0.25, "test_mine": 1.5}
        work[0] |= {"val_accuracy": 0.5, "samples": 9 if seed else 9000}
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in work))
    write_report([tmp_path], tmp_path / "report.html")
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page, complaints = opened(context, tmp_path / "report.html")
    draw_all(page)
    texts = """(name) => { const found = [], walk = (item) => {
        if (item.text !== undefined) found.push(String(item.text));
        (item.items || []).forEach(walk);
    }; walk(figures.find((one) => one.name === name).view.scenegraph().root); return found; }"""
    coloured = """(id) => { const canvas = document.querySelector(`#${id} canvas`), { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        let n = 0;
        for (let i = 0; i < data.length; i += 4) n += data[i + 3] > 200 && data[i + 2] - data[i] > 100;
        return n; }"""
    heads = [head.strip(" ↕") for head in page.locator("#results th").all_inner_texts()]
    assert heads[:4] == ["configuration", "test accuracy", "validation accuracy", "test_mine"]
    assert page.evaluate(coloured, "curve") > 20, "the point of the only evaluation"
    page.select_option("#training select[name=key]", "lr")
    page.evaluate("figures.find((one) => one.name === 'training').draw()")
    assert {"0.05", "0.04"} <= set(page.evaluate(texts, "training")), "a constant's own value is on its axis"
    assert page.evaluate(texts, "strata")[:5] == ["1", "2", "3", "round", "1"]
    assert not [text for text in page.evaluate(texts, "strata") if "." in text]
    page.select_option("#target select[name=axis]", "samples")
    page.select_option("#target select[name=scale]", "log")
    page.evaluate("figures.find((one) => one.name === 'target').draw()")
    assert complaints == [], "no band goes down to 0 where the scale is logarithmic"
    context.close()


def test_drawing_a_figure_moves_nothing_below_it(page: Any, page_file: Path) -> None:
    """A click on a button meant what had moved there, where figures above came into sight with it."""
    tab, complaints = opened(page.context, page_file)
    heights = "() => figures.map((figure) => [figure.name, figure.node.getBoundingClientRect().height])"
    before = tab.evaluate(heights)
    draw_all(tab)
    for (name, reserved), (_, drawn) in zip(before, tab.evaluate(heights), strict=True):
        assert abs(reserved - drawn) <= 8, name  # less than half a button
    assert complaints == []
    tab.close()


def test_every_figure_comes_as_svg_and_csv(page: Any, page_file: Path) -> None:
    names = [figure.get_attribute("id") for figure in page.locator("figure").all()]
    for name in names:  # each in a tab of its own: Chromium ends a tab's downloads after the tenth
        tab, complaints = opened(page.context, page_file)
        saved = {}
        for kind in ("SVG", "CSV"):
            with tab.expect_download() as download:
                tab.locator(f"figure#{name}").get_by_role("button", name=kind, exact=True).click()
            assert download.value.suggested_filename == f"{name}.{kind.lower()}"
            saved[kind] = Path(download.value.path()).read_text()
        svg = ET.fromstring(saved["SVG"])
        assert svg.tag.endswith("svg") and len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 2
        rows = list(csv.DictReader(io.StringIO(saved["CSV"])))
        assert len(rows) == tab.evaluate(
            "(name) => { const f = figures.find((one) => one.name === name); return f.rows(f.state).length; }", name
        )
        assert complaints == []
        tab.close()


def test_a_run_that_is_not_finished_and_tells_no_loss_is_drawn(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('preset = "fedavg"\nrounds = 9\n')
    (tmp_path / "metrics.jsonl").write_text('{"round": 0, "samples": 9, "seconds": 0.1, "clients": "0-3"}\n')
    write_report([tmp_path], tmp_path / "report.html")
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page, complaints = opened(context, tmp_path / "report.html")
    draw_all(page)
    assert complaints == [] and page.locator("#participation canvas").count() == 1
    assert page.locator("#loss, #evenness").count() == 0 and page.locator("#runs").count() == 1
    context.close()


def test_tables_come_as_csv_with_numbers_and_any_name_is_drawn(chromium: Any, tmp_path: Path) -> None:
    """Configurations and numbers may be called as something that every JavaScript object has."""
    for name in ("constructor", "plain"):
        for seed in (0, 1):
            folder = tmp_path / "runs" / f"{name}-{seed}"
            folder.mkdir(parents=True)
            (folder / "config.toml").write_text(f"rounds = 2\nseed = {seed}\n[local]\nlr = {len(name)}.0\n")
            (folder / "sweep.json").write_text(f'{{"labels": {{"run": "{name}", "seed": {seed}}}}}')
            own = {"constructor": 3.5} if name == "plain" else {}
            scores = {"samples": 10, "seconds": 0.5, "test_accuracy": 0.25 + 0.5 * seed, **own}
            lines = (json.dumps({"round": t, **scores}) for t in (0, 1))
            (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
            (folder / "summary.json").write_text('{"final": {"round": 1}, "clients": 20, "parameters": 55210}')
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page, complaints = opened(context, tmp_path / "report.html")
    draw_all(page)
    assert page.locator("#curve canvas").count() == 1
    assert page.evaluate("curve('test_accuracy', 'round').length") == 4
    page.select_option("#curve select[name=key]", "constructor")
    draw_all(page)
    assert page.evaluate("curve('constructor', 'round').map((row) => row.configuration)") == ["plain"] * 2
    tables = {}
    for name in ("results", "to-target", "runs"):
        with page.expect_download() as download:
            page.locator(f"#{name}").get_by_role("button", name="CSV", exact=True).click()
        tables[name] = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    [own, _] = tables["results"]
    assert own["configuration"] == "constructor" and own["test accuracy"] == "0.5" and own["samples"] == "20"
    assert float(own["test accuracy (deviation)"]) == pytest.approx(0.35355, abs=1e-4) and own["seeds"] == "2"
    for row in tables["to-target"]:
        assert (row["runs that reached it"], row["runs that reached it (of)"]) == ("2", "2")
        assert float(row["rounds"]) == 1
    assert {(row["clients"], row["parameters"]) for row in tables["runs"]} == {("20", "55210")}
    assert complaints == []
    context.close()
