"""The fedmpi command, also `python -m fedmpi`.

What is loaded before signals are heeded takes milliseconds: a warning of the batch system that arrives earlier ends the
process, as it would any program.
"""

import sys

from fedmpi.process.signals import Interrupt


def main() -> None:
    """Entry point of the console script."""
    interrupt = Interrupt() if sys.argv[1:2] == ["train"] else None
    from fedmpi.cli import run_command

    run_command(interrupt)


if __name__ == "__main__":
    main()
