"""What a run was made with: versions and the commit of the source."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import torch

import fedmpi


def versions(mpi: str) -> dict[str, str]:
    """Versions of fedmpi, Python, torch, NumPy and the MPI library (as the cluster names it)."""
    return {
        "fedmpi": fedmpi.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "mpi": mpi,
    }


@cache
def git_commit() -> str | None:
    """The commit of the checkout that fedmpi runs from; None for an installed copy, and where there is no git.

    Many runs of one process have the code that was loaded, and so one commit.
    """
    folder = Path(fedmpi.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
