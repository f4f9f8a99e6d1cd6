"""Several commands in one job, or in one process, so that torch is loaded once.

`python -m tests.mpi.commands FOLDER`, where FOLDER/commands.json holds the arguments of each command by its name. How a
rank ended one of them, and what it printed, is in FOLDER/NAME.RANK.json; the last command ends the job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.mpi.launch import run_alone, run_mpi
from tests.quick_end import end_quickly

Commands = Mapping[str, Sequence[str | Path]]


def run_commands(
    ranks: int | None, commands: Commands, folder: Path, timeout: float, cwd: Path | None = None
) -> dict[str, CompletedProcess[str]]:
    """Run `fedmpi ARGUMENTS` for each of the commands on so many ranks of one job, sequentially."""
    asked = {name: list(map(str, arguments)) for name, arguments in commands.items()}
    (folder / "commands.json").write_text(json.dumps(asked))
    program = ["-m", "tests.mpi.commands", folder]
    job = run_mpi(ranks, program, timeout, cwd=cwd) if ranks else run_alone(program, timeout, cwd=cwd)
    *others, last = asked
    ended = {}
    for name in others:
        files = [folder / f"{name}.{rank}.json" for rank in range(ranks or 1)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        codes = {each["code"] for each in found}
        code = codes.pop() if len(codes) == 1 and len(found) == len(files) else -1
        printed, said = ("".join(each[stream] for each in found) for stream in ("output", "error"))
        ended[name] = CompletedProcess(asked[name], code, printed, said if found else job.stderr)
    return ended | {last: CompletedProcess(asked[last], job.returncode, job.stdout, job.stderr)}


def main() -> None:
    from fedmpi.__main__ import main as command
    from fedmpi.mpi import read_launch

    launch, folder = read_launch(), Path(sys.argv[1])
    rank = launch.rank if launch else 0
    *others, last = json.loads((folder / "commands.json").read_text()).items()
    own = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for name, arguments in others:
        files = {descriptor: folder / f"{name}.{rank}.{descriptor}" for descriptor in own}
        for descriptor, path in files.items():
            with open(path, "wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.argv = ["fedmpi", *arguments]
        try:
            command()
        except SystemExit as end:
            sys.stdout.flush()
            found = {"code": end.code or 0, "output": files[1].read_text(), "error": files[2].read_text()}
            (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
        finally:
            for descriptor, kept in own.items():
                os.dup2(kept, descriptor)
    sys.argv = ["fedmpi", *last[1]]
    command()


if __name__ == "__main__":
    end_quickly()
    main()
