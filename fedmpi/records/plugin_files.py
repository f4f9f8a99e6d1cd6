"""The files of a model of the user's own: the module that `model.name` names, and what else is loaded of the user's."""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.models import builder_of

INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
PACKAGES = ("site-packages", "dist-packages")
"""Names of folders for installed packages."""

LEFT_OUT = ("fedmpi", "__main__")


def plugin_files(name: str) -> dict[str, str]:
    """SHA-256 of every source file behind a model "package.module:function", each named by its module.

    Counted are the module itself and all others that are loaded when it is, wherever they lie: those that it imports.
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
    importlib.import_module(name.partition(":")[0])
    return {shown: hashlib.sha256(path.read_bytes()).hexdigest() for shown, path in sorted(_loaded().items())}


def _loaded() -> dict[str, Path]:
    """The source files of the loaded modules that are the user's own, named as they lie below a folder of sys.path."""
    found = {}
    for name, module in sys.modules.copy().items():
        path = Path(getattr(module, "__file__", None) or "").resolve()
        if name.partition(".")[0] not in LEFT_OUT and path.suffix == ".py" and path.is_file() and not _installed(path):
            depth = name.count(".") + 1 + (path.name == "__init__.py")
            found["/".join(path.parts[-depth:])] = path
    return found


def _installed(path: Path) -> bool:
    return any(part in PACKAGES for part in path.parts) or any(path.is_relative_to(folder) for folder in INSTALLED)
