"""Several commands in one process, so that torch is loaded once.

`python -m tests.mpi.commands FOLDER`, where FOLDER/commands.json holds the arguments of each command by its name. How
each ended, and what it printed, is in FOLDER/NAME.json; the last command ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.mpi.launch import run_alone
from tests.quick_end import end_quickly

Commands = Mapping[str, Sequence[str | Path]]


def run_commands(commands: Commands, folder: Path, timeout: float) -> dict[str, CompletedProcess[str]]:
    """Run `fedmpi ARGUMENTS` for each of the commands, sequentially."""
    asked = {name: list(map(str, arguments)) for name, arguments in commands.items()}
    (folder / "commands.json").write_text(json.dumps(asked))
    done = run_alone(["-m", "tests.mpi.commands", folder], timeout)
    *others, last = asked
    ended = {name: CompletedProcess(asked[name], *json.loads((folder / f"{name}.json").read_text())) for name in others}
    return ended | {last: CompletedProcess(asked[last], done.returncode, done.stdout, done.stderr)}


def main() -> None:
    from fedmpi.__main__ import main as command

    folder = Path(sys.argv[1])
    *others, last = json.loads((folder / "commands.json").read_text()).items()
    own = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for name, arguments in others:
        files = {descriptor: folder / f"{name}.{descriptor}" for descriptor in own}
        for descriptor, path in files.items():
            with open(path, "wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.argv = ["fedmpi", *arguments]
        try:
            command()
        except SystemExit as end:
            sys.stdout.flush()
            found = [end.code or 0, files[1].read_text(), files[2].read_text()]
            (folder / f"{name}.json").write_text(json.dumps(found))
        finally:
            for descriptor, kept in own.items():
                os.dup2(kept, descriptor)
    sys.argv = ["fedmpi", *last[1]]
    command()


if __name__ == "__main__":
    end_quickly()
    main()
