"""What ranks run of which tests ask for several commands: one job runs them all, so that torch is loaded once.

`python -m tests.mpi.commands FOLDER`, where FOLDER/commands.json holds the arguments of each command by its name. How a
rank ended one of them, and what it said on standard error, stands in FOLDER/NAME.RANK.json; the last command ends the
job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.mpi.launch import run_mpi
from tests.quick_end import end_quickly

Commands = Mapping[str, Sequence[str | Path]]


def run_commands(
    ranks: int, commands: Commands, folder: Path, timeout: float, cwd: Path | None = None
) -> dict[str, CompletedProcess[str]]:
    """Run `fedmpi ARGUMENTS` for each of the commands on so many ranks of one job, one after another.

    Parameters
    ----------
    ranks : int
    commands : mapping
        The arguments of each command by its name.
    folder : Path
        An empty one.
    timeout : float
        Seconds, of all together.
    cwd : Path, optional
        Working folder; the repository by default.

    Returns
    -------
    dict
        By name the exit code in which all ranks ended (None where they were not of one mind, or the command was never
        at its end) and what they said on standard error, rank by rank. The last command's are those of the job.
    """
    (folder / "commands.json").write_text(
        json.dumps({name: list(map(str, arguments)) for name, arguments in commands.items()})
    )
    job = run_mpi(ranks, ["-m", "tests.mpi.commands", folder], timeout, cwd=cwd)
    ended = {}
    for name in commands:
        files = [folder / f"{name}.{rank}.json" for rank in range(ranks)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        codes = {code for code, _ in found} if len(found) == ranks else {None}
        words = "".join(words for _, words in found)
        ended[name] = CompletedProcess(
            commands[name], codes.pop() if len(codes) == 1 else None, "", words or job.stderr
        )
    ended[name].returncode, ended[name].stderr = job.returncode, job.stderr
    return ended


def main() -> None:
    from fedmpi.__main__ import main as command
    from fedmpi.cluster import read_launch

    launch, folder = read_launch(), Path(sys.argv[1])
    rank = launch.rank if launch else 0
    *others, last = json.loads((folder / "commands.json").read_text()).items()
    own = os.dup(2)
    for name, arguments in others:
        said = folder / f"{name}.{rank}.txt"
        with open(said, "wb") as file:
            os.dup2(file.fileno(), 2)
        sys.argv = ["fedmpi", *arguments]
        try:
            command()
        except SystemExit as end:
            (folder / f"{name}.{rank}.json").write_text(json.dumps([end.code or 0, said.read_text()]))
        finally:
            os.dup2(own, 2)
    sys.argv = ["fedmpi", *last[1]]
    command()


if __name__ == "__main__":
    end_quickly()
    main()
