"""Rebuild the pages that show output: run their commands, insert what these print, and make the figures.

    python docs/rebuild.py [docs/tutorials/compare-methods.md …]

In a page a block ```toml or ```python whose first line is a comment with a file's name is written to that file; any
other ```python block is run; a ```sh block is run by bash; the ```text block that follows gets what was printed.
```sh skip blocks are left alone. Pictures named images/tutorial/NAME.svg or .png come from the commands' folder.
A Chromium photographs report.html there. Needs the extras `mpi` and `report`, and playwright.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGES = (
    "tutorials/first-simulation.md",
    "tutorials/compare-methods.md",
    "tutorials/own-sampler.md",
    "howto/private-sizes.md",
)
BLOCK = re.compile(r"^```(?P<kind>sh|toml|python|text)(?P<skip> skip)?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.-]+\.(?:toml|py))\n")
PICTURE = re.compile(r"\((?:\.\./)?images/tutorial/([\w-]+\.(?:png|svg))\)")
WIDTH = 110


def rebuild(page: Path, folder: Path) -> str:
    """Return the page with what its commands print now; they run in turn in a folder."""
    printed: str | None = None

    def renewed(found: re.Match[str]) -> str:
        nonlocal printed
        kind, body = found["kind"], found["body"]
        if kind == "text" and printed is not None:
            text, printed = printed, None
            return f"```text\n{text}```"
        named = FILE.match(body)
        if found["skip"] or kind == "text" or (kind == "toml" and not named):
            return found[0]
        if named:
            (folder / named[1]).write_text(body.partition("\n")[2])
            return found[0]
        print(f"$ {body.strip()}", flush=True)
        printed = run(
            ["bash", "-euo", "pipefail", "-c", body] if kind == "sh" else [sys.executable, "-c", body], folder
        )
        return found[0]

    return BLOCK.sub(renewed, page.read_text(encoding="utf-8"))


def run(command: list[str], folder: Path) -> str:
    """Return what a command prints, errors included, in a terminal of fixed width and without styles."""
    beside = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{beside}:{os.environ['PATH']}",
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', DOCS.parent)}",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.replace(f"{folder}/", "").splitlines())


def photograph(folder: Path) -> None:
    """Take a picture of the top of report.html."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no Chromium to photograph report.html with: install one, or set CHROMIUM")
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1330})
        page.goto((folder / "report.html").as_uri())
        page.wait_for_function("document.querySelectorAll('canvas').length >= 2")
        page.wait_for_timeout(1_000)
        page.screenshot(path=str(folder / "report.png"))
        browser.close()


def main() -> None:
    """Rebuild the pages named, or all."""
    for page in [Path(name) for name in sys.argv[1:]] or [DOCS / name for name in PAGES]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text = rebuild(page, folder)
            pictures = PICTURE.findall(text)
            if "report.png" in pictures:
                photograph(folder)
            (DOCS / "images" / "tutorial").mkdir(parents=True, exist_ok=True)
            for picture in pictures:
                shutil.copyfile(folder / picture, DOCS / "images" / "tutorial" / picture)
        page.write_text(text, encoding="utf-8")
        print(f"rebuilt {page}", flush=True)


if __name__ == "__main__":
    main()
