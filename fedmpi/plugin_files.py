"""The files of a model of the user's own: the module that `model.name` names, and what it has loaded beside itself."""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from pathlib import Path

from fedmpi.errors import UserError
from fedmpi.models import builder_of

INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))

LEFT_OUT = ("fedmpi", "__main__")


def plugin_files(name: str) -> dict[str, str]:
    """SHA-256 of every source file behind a model "package.module:function", by path below the folder it came from.

    Counted are the module itself and the modules that are loaded from below the same folder: those that it imports.
    Installed packages, fedmpi and modules without a source file are left out.

    Parameters
    ----------
    name : str
        `model.name`; a built-in model has no files of its own.

    Returns
    -------
    dict
        Empty for built-in models. A module that cannot be imported gives the reason in the place of a digest.
    """
    if ":" not in name:
        return {}
    try:
        builder_of(name)
    except UserError as error:
        return {name: str(error)}
    module_name = name.partition(":")[0]
    module = importlib.import_module(module_name)
    own = Path(module.__file__ or "").resolve()
    if not own.is_file():
        return {}
    package_depth = module_name.count(".") + (own.name == "__init__.py")
    root = own.parents[package_depth]
    found = {own, *_loaded_below(root)}
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(found)}


def _loaded_below(root: Path) -> set[Path]:
    loaded = [(name, getattr(module, "__file__", None)) for name, module in sys.modules.copy().items()]
    paths = {Path(file).resolve() for name, file in loaded if file and name.partition(".")[0] not in LEFT_OUT}
    return {
        path
        for path in paths
        if path.suffix == ".py"
        and path.is_file()
        and path.is_relative_to(root)
        and not any(path.is_relative_to(folder) for folder in INSTALLED)
    }
