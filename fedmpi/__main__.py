"""`python -m fedmpi`: the same as the fedmpi command."""

from fedmpi.cli import main

main()
