"""A job of the conformance kit, `[mpiexec -n N] python -m fedmpi.testing.job RUNS.json`: does the runs listed there."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from fedmpi.api import run
from fedmpi.common.errors import UserError
from fedmpi.process.exit_codes import run_guarded


def _loaded(chosen: Any) -> Any:
    """The part of a run that was read: a name, or an object of a file."""
    if isinstance(chosen, str):
        return chosen
    module, path = chosen["module"], chosen["file"]
    try:
        found = importlib.import_module(module if module != "__main__" else "no module of that name")
    except ImportError:
        found = None
    if found is None or not found.__file__ or Path(found.__file__).resolve() != Path(path):
        module = "part_under_test" if module == "__main__" else module
        spec = importlib.util.spec_from_file_location(module, path)
        if spec is None or spec.loader is None:
            raise UserError(f"{path} cannot be imported")
        found = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for name in chosen["name"].split("."):
        found = getattr(found, name)
    return found


def main() -> int:
    """Do the runs that a file lists, on every rank of the job; a failure that all ranks share ends its run alone."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        settings = {**job["settings"], job["key"]: _loaded(job["chosen"])}
        try:
            run(settings, out=job["out"], resume=job["resume"])
        except Exception as error:
            Path(f"{job['out']}.failed").write_text(f"{type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    run_guarded(main)
