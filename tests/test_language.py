"""The glossary: words that no page, help text, message, docstring or comment contains, with the right words.

The field's terms are easier to read than private ones (docs/dev/decisions.md). A pattern has no exceptions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = {
    r"processors?": "CPU",
    r"made[-\s]+up": "synthetic",
    r"row\s+rules?": "data sampler",
    r"combiners?": "aggregator",
    r"means?\s+nothing": "has no effect",
    r"side\s+by\s+side": "batched, or at the same time",
    r"one\s+after\s+(?:another|the\s+other)": "sequentially, in turn",
    r"Student's": "95 % confidence interval (paired t)",
    r"in\s+(?:the\s+)?place\s+of": "instead of",
    r"(?:one's|their|his)\s+own": "custom",
    r"published\s+systems?": "published method",
    r"refus(?:e|es|ed|al|als)(?!\()": "reject",
    r"to\s+the\s+bit|the\s+same\s+bits": "bit for bit, bit-identical",
    r"goes\s+on|go\s+on|begins?\s+anew": "continues, resumes, restarts",
    r"tells?|told": "reports, prints; distinguishable",
    r"who\s+(?:is|are)\s+there|takes?\s+part": "available; is selected",
    r"nobody|somebody|everybody": "no client, all clients",
    r"(?<!\.)wanted(?!\s:)": "requested, budget",
    r"\w+,\s+of\s+which": "split the sentence",
    r"lies|stands?": "is",
    r"unlike": "different",
    r"(?:central|normal|random|standard|summar|initial|regular)is(?:e|es|ed|ing|ation)": "US spelling",
    r"neighbou\w+|colou\w+|behaviou\w+|(?:un)?labelled|licences?": "US spelling",
    r"seldom|heeded|henceforth|thereof|whereof|therein": "plain words",
}
"""Pattern → what to write instead."""
PATTERN = re.compile(rf"\b(?:{'|'.join(GLOSSARY)})\b", re.IGNORECASE)
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs", "jobs", "benchmarks")]
SOURCES = [ROOT / name for name in ("fedmpi", "data_prep", "benchmarks", "tests", "jobs", "docs")]


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the text of every page without its code blocks."""
    for place in PAGES:
        for page in [place] if place.is_file() else sorted(place.rglob("*.md")):
            yield (
                page,
                re.sub(
                    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL
                ),
            )


def experiments() -> Iterator[tuple[Path, str]]:
    """Yield every comment of presets and experiments."""
    for place in ("fedmpi/presets", "jobs", "docs/examples"):
        for path in sorted((ROOT / place).rglob("*.toml")):
            for line in path.read_text(encoding="utf-8").splitlines():
                if found := re.search(r"(?:^|\s)# (.*)", line):
                    yield path, re.sub(r"`[^`\n]*`", " ", found[1])


def sources() -> Iterator[tuple[Path, str]]:
    """Yield every docstring, message and comment."""
    for place in SOURCES:
        for path in sorted(place.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                    yield path, re.sub(r"`[^`\n]*`", " ", node.value)
            for line in text.splitlines():
                if found := re.search(r"(?:^|\s)# (.*)", line):
                    yield path, found[1]


@pytest.mark.parametrize("texts", [pages, experiments, sources])
def test_the_field_s_words_are_used(texts: object) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {' '.join(text[max(0, match.start() - 40) : match.end() + 30].split())}"
        for path, text in texts()  # type: ignore[operator]
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)
