"""Examples on the pages can be typed: commands and options are there, keys are keys, every preset has its equations."""

from __future__ import annotations

import math
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer

from fedmpi import presets
from fedmpi.cli import app
from fedmpi.common.registry import KINDS
from fedmpi.config.keys import all_keys
from fedmpi.config.layers import assignments
from fedmpi.privacy.sizes import make_mechanism

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "jobs" / "README.md"])
BLOCK = re.compile(r"^```sh.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS_OF_PARTS = tuple(f"{kind.key}." for kind in KINDS.values())


def commands(page: Path) -> list[list[str]]:
    """The words of every `fedmpi …` in the page's shell blocks, without launchers and comments."""
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r" && | \| | > ", line.partition(" #")[0]):
                if match := re.search(r"(?:^|\s)(?:\.venv/bin/)?fedmpi (.*)", command):
                    found.append(shlex.split(match[1]))
    return found


SHOWN = [pytest.param(words, id=f"{page.name}: {' '.join(words)[:70]}") for page in PAGES for words in commands(page)]


def test_there_are_commands_on_the_pages() -> None:
    assert len(SHOWN) > 40


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_that_is_shown_is_understood(words: list[str]) -> None:
    group = typer.main.get_command(app)
    if words[0].startswith("--"):
        group.make_context("fedmpi", words, resilient_parsing=words[0] == "--install-completion")
        return
    name, *arguments = words
    context = group.get_command(None, name).make_context(name, arguments)
    for key in assignments([word for word in context.params.get("settings") or [] if "%a" not in word]):
        assert key in all_keys() or key.startswith(OPTIONS_OF_PARTS), key


GUIDES = [
    page
    for page in PAGES
    if (page.parent.name == "howto" or page == ROOT / "docs" / "index.md")
    and "```python" in page.read_text(encoding="utf-8")
]


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_python_blocks_of_guides_and_of_the_landing_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), {})


def test_the_clients_that_private_sizes_need_follow_from_the_variances() -> None:
    page = (ROOT / "docs" / "explanation" / "epsilon.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert rows
    for samples, threshold, *needed in rows:
        for name, clients in zip(("randomized-response", "piecewise", "duchi"), needed, strict=True):
            variance = make_mechanism(name, 3.0, int(threshold)).variance(np.array([int(samples)]))[0]
            assert math.ceil(variance / (0.1 * int(samples)) ** 2) == int(clients.replace(",", "")), name


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = re.findall(
        r"```{toctree}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.DOTALL
    )
    named = {line for one in contents for line in one.splitlines() if line and not line.startswith(":")}
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert named == {page for page in pages if page != "index" and not page.startswith("dev/")}


def test_every_preset_has_its_equations() -> None:
    page = (ROOT / "docs" / "explanation" / "methods.md").read_text(encoding="utf-8")
    for preset in presets():
        assert f"`{preset.name}`" in page, preset.name
    for name in re.findall(r"`([\w-]+)`(?:\]|, )", page.partition("## Federated")[0]):
        assert name in {preset.name for preset in presets()} or "." in name, name


def test_blocks_are_run_and_what_they_print_is_put_below_them(tmp_path: Path) -> None:
    rebuild = runpy.run_path(str(ROOT / "docs" / "rebuild.py"))["rebuild"]
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n# mine.py\nprint('from a file')\n```\n```sh\npython mine.py\necho two  \n```\n\n```text\nold\n```\n"
        "```sh skip\nfalse\n```\n```text\nkept\n```\n```toml\na = 1\n```\n```python\nprint(6 * 7)\n```\n```text\n```\n"
    )
    made = rebuild(page, tmp_path)
    assert "```text\nfrom a file\ntwo\n```" in made and "old" not in made
    assert "```sh skip\nfalse\n```\n```text\nkept\n```" in made and made.endswith("```text\n42\n```\n")
    page.write_text("```sh\necho what; exit 3\n```\n")
    with pytest.raises(SystemExit, match="exit code 3:\nwhat"):
        rebuild(page, tmp_path)
