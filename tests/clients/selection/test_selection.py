"""Samplers of papers: registered by their files, and written against the public interface alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import fedmpi

ROOT = Path(__file__).parents[3]
FOLDERS = {"client sampler": ROOT / "fedmpi/clients/selection", "data sampler": ROOT / "fedmpi/samples/selection"}
FILES = {path: kind for kind, folder in FOLDERS.items() for path in sorted(folder.glob("[a-z]*.py"))}
LIBRARIES = {"fedmpi", "numpy", "scipy", "sklearn", "torch", "pydantic"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_uses_the_public_interface_and_is_registered(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in modules if name.partition(".")[0] not in LIBRARIES or name.startswith("fedmpi.")]
    parts = [part for part in fedmpi.components(FILES[path]) if part.object.__module__.endswith(f".{path.stem}")]
    assert parts and all("Deviations" in part.object.__doc__ for part in parts)
