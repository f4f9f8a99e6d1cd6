"""The fedmpi command, also `python -m fedmpi`.

The imports before signal handlers are installed take milliseconds; an earlier warning of the batch system ends the
process, as it would any program. The imports before the first printed line take a few tenths of a second.
"""

import sys
from functools import partial

from fedmpi.process.signals import Interrupt


def main() -> None:
    """Run a command as the entry point of the console script; any failure ends all ranks of the job."""
    saves = sys.argv[1:2] in (["train"], ["sweep"])
    interrupt = Interrupt() if saves else None
    from fedmpi.process.exit_codes import run_guarded

    run_guarded(partial(_run, interrupt), joins=sys.argv[1:2] != ["doctor"], ignores_lost_output=saves)


def _run(interrupt: Interrupt | None) -> int:
    if sys.argv[1:2] == ["train"] and "--help" not in sys.argv:
        _greet()
    from fedmpi.cli import run_command

    return run_command(interrupt)


def _greet() -> None:
    """Print the first line of a run on rank 0, before anything slow is loaded."""
    from fedmpi import __version__
    from fedmpi.mpi import read_launch

    launch = read_launch()
    who = "one process" if launch is None or launch.size == 1 else f"{launch.size} ranks"
    if launch is None or launch.rank == 0:
        print(f"fedmpi {__version__}: {who}, loading ...", flush=True)


if __name__ == "__main__":
    main()
