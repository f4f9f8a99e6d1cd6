"""Examples on the pages can be typed: commands and options are there, keys are keys, every preset has its equations."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from data_prep.__main__ import app as data_prep_app
from data_prep.__main__ import run as prepared
from fedmpi import presets
from fedmpi.cli import app
from fedmpi.common.registry import KINDS
from fedmpi.config.keys import all_keys
from fedmpi.config.loading import assignments
from fedmpi.privacy.sizes import make_mechanism

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "jobs" / "README.md"])
BLOCK = re.compile(r"^```sh.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = typer.main.get_command(app)
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
    if words[0].startswith("--"):
        PROGRAM.make_context("fedmpi", words, resilient_parsing=words[0] == "--install-completion")
        return
    name, *arguments = words
    context = PROGRAM.get_command(None, name).make_context(name, arguments)
    for key in assignments([word for word in context.params.get("settings") or [] if "%a" not in word]):
        assert key in all_keys() or key.startswith(OPTIONS_OF_PARTS), key


SHORT = {"train": ["--set", "rounds=2"], "check": ["--quick"], "submit": ["--dry-run"], "sweep": ["--index", "0"]}
"""Options that shorten a command of the pages."""
OTHERS = re.compile(r"(pip|python3 -m venv|srun|sbatch|ln|export|tensorboard|sha256sum|ls|tail|#) ?")
"""Commands of other programs."""
FILE = re.compile(r"# ([\w.-]+\.(?:toml|py))\n")
FOUND = {
    "run.toml": None,
    "runs/first": "fedmpi train run.toml --out runs/first",
    "runs/fedavg-0": "fedmpi train run.toml --out runs/fedavg-0",
    "runs/fedavg-1": "fedmpi train run.toml --set seed=1 --out runs/fedavg-1",
    "runs/fedsso-0": "fedmpi train run.toml --set preset=fedsso --out runs/fedsso-0",
    "runs/sweep": "fedmpi sweep docs/examples/sweep.toml --set evaluation.clients=all --out runs/sweep",
    "shards/mnist": "python -m data_prep digits --partition iid --clients 100 --out shards/mnist",
}
"""Files and folders that pages take from other pages, and the commands that write them."""
GUIDES = [
    page
    for page in PAGES
    if page.parent.name in ("howto", "tutorials", "explanation") or page.name in ("index.md", "gallery.md", "README.md")
    if page.parent.name not in ("jobs", "papers")
    if re.search(r"```(python|sh)\n", page.read_text(encoding="utf-8"))
]


class Workplace:
    """A folder in which the blocks of a page run with fewer rounds, in this process."""

    def __init__(self, folder: Path, page: Path):
        self.folder, self.page = folder, page
        self.unnamed: str | None = None
        self.runs = 0
        for name in ("docs", "jobs"):
            (folder / name).symlink_to(ROOT / name)
        for example in (ROOT / "docs" / "examples").glob("*.py"):
            shutil.copy(example, folder)
        for number in range(12):
            picture = folder / "photos" / "catdog"[number % 2 * 3 :][:3] / f"{number}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), 20 * number, np.uint8)).save(picture)

    def block(self, kind: str, body: str) -> None:
        """Run a Python block or a block of commands; write a file."""
        if named := FILE.match(body):
            (self.folder / named[1]).write_text(re.sub(r"^seed = .*", "seed = [0, 1]", body, flags=re.MULTILINE))
        elif kind == "toml":
            self.unnamed = body
        elif kind == "python" and "parametrize_with_checks" not in body:
            exec(compile(body, self.page.name, "exec"), {"__name__": "page"})
        for line in body.replace("\\\n", " ").splitlines() if kind == "sh" else ():
            self.line(line)

    def line(self, line: str) -> None:
        """Run a command of this package, or a Python file of the page."""
        line = re.split(r" \| | > ", re.sub(r"\s#.*", "", line.strip()))[0]
        line = re.sub(r"^(\.venv/bin/)?mpiexec -n \d+ (\.venv/bin/)?", "", line.rpartition("&& ")[2])
        if not torch.cuda.is_available():
            line = line.replace("cluster.device=cuda", "cluster.device=cpu")
        if not line or OTHERS.match(line):
            return
        for file in re.findall(r"(?<![\w/.])([\w-]+\.toml)", line):
            if not (self.folder / file).exists() and (file == "run.toml" or self.unnamed is not None):
                (self.folder / file).write_text(self.unnamed or 'preset = "fedavg"\nclients.count = 5\n')
        configuration = (self.unnamed or "") * line.startswith("fedmpi train")
        for name, command in FOUND.items():
            written = re.search(rf"--out {name}(?![\w-])", line) and "--resume" not in line
            if (
                command
                and re.search(rf"{name}(?![\w-])", line + configuration)
                and not written
                and not (self.folder / name).exists()
            ):
                self.line(command)
        if found := re.match(r"python ([\w.]+\.py)", line):
            runpy.run_path(found[1])
        elif found := re.match(r"python -m data_prep (.*)", line):
            offline = any(word in line for word in (" digits ", ":", "arrays ", "photos", " list", " augment "))
            assert prepared(shlex.split(found[1]) + ["--dry-run"] * (not offline)) == 0, line
        elif line.startswith("fedmpi "):
            words = shlex.split(line)[1:]
            words += [] if "--dry-run" in words else self.shorter(words)
            code = app(words, standalone_mode=False)
            assert code in (0, None) or words[0] == "doctor", line

    def shorter(self, words: list[str]) -> list[str]:
        """Return further arguments that make a command quick."""
        if words[0] == "sweep" and "jobs/experiments" in words[1]:
            return ["--dry-run"]
        if words[0] == "sweep" and self.page.parent.name == "tutorials":
            return SHORT["train"]
        self.runs += 1
        unnamed = ["--out", f"runs/unnamed{self.runs}"] if words[0] == "train" and "--out" not in words else []
        return SHORT.get(words[0], []) + unnamed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_blocks_of_guides_run_with_fewer_rounds(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run every Python block and every command of the package, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "site"))
    workplace = Workplace(tmp_path, page)
    for kind, body in re.findall(r"```(python|toml|sh)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        workplace.block(kind, body)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads((ROOT / "docs" / "tutorials" / "first-simulation.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["skewed"].summary["final"]["test_accuracy"] > 0.5  # type: ignore[attr-defined]


def test_no_description_of_a_command_is_cut_at_80_columns() -> None:
    for program in (app, data_prep_app):
        shown = CliRunner().invoke(program, ["--help"], env={"COLUMNS": "80"}).output
        assert "Commands:" in shown and "..." not in shown.partition("Commands:")[2]


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
