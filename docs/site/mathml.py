"""Formulas as MathML, made when the site is built: no script, no font and no network is needed to see them."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util.logging import getLogger

log = getLogger(__name__)


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_converted(node, "inline"))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_converted(node, "block")}</div>')
    raise nodes.SkipNode


def _converted(node: nodes.Element, display: str) -> str:
    made: str = convert(node.astext(), display=display)
    if "\\" in re.sub("<[^>]+>", "", made):
        log.warning("a command in %s is not known", node.astext(), location=node)
    return made


def setup(app: Any) -> dict[str, bool]:
    """The renderer "mathml"."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
