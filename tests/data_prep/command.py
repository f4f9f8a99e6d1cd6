"""The command line of data_prep inside the test's own process: what the program prints, and its exit code."""

from __future__ import annotations

import sys

from data_prep.__main__ import run
from fedmpi import UserError


def main(words: list[str]) -> int:
    """Run one command; errors go to stderr and give 2, as `fedmpi.process.exit_codes` does for the program."""
    try:
        return run(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
