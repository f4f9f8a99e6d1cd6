"""Output of a command that no process reads any more, or that cannot be stored."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedmpi.process.exit_codes import OutputLost
from fedmpi.process.exit_codes import _Stream as Stream
from tests.mpi.launch import REPOSITORY


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def text(descriptor: int, raises: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(Stream(descriptor, raises)))


@pytest.mark.parametrize("raises", [False, True])
def test_output_without_a_reader_interrupts_a_command_once_and_a_run_never(unread: int, raises: bool) -> None:
    stream = text(unread, raises)
    with pytest.raises(OutputLost) if raises else nullcontext() as lost:
        print("one", file=stream, flush=True)
    assert lost is None or lost.value.unread
    print("two", file=stream, flush=True)


def test_a_full_disk_is_a_failure_with_its_reason() -> None:
    with open("/dev/full", "wb") as full, pytest.raises(OutputLost, match="No space left") as lost:
        print("one", file=text(full.fileno(), raises=True), flush=True)
    assert not lost.value.unread


def test_a_pipe_that_is_full_and_does_not_block_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    written = bytes(range(256)) * 4096
    got = bytearray()

    def read() -> None:
        while part := os.read(reading, 65536):
            got.extend(part)

    reader = threading.Timer(0.05, read)
    reader.start()
    buffer = io.BufferedWriter(Stream(writing, raises=True))
    buffer.write(written)
    buffer.flush()
    os.close(writing)
    reader.join()
    os.close(reading)
    assert got == written


GUARDED = """
import sys
from fedmpi.process.exit_codes import run_guarded

def main():
    for number in range(int(sys.argv[1])):
        print(number)
    return 0

run_guarded(main, outlives=sys.argv[2] == "outlives")
"""


@pytest.mark.parametrize(
    ("lines", "outlives", "output", "code", "said"),
    [
        (5, "ends", "unread", 141, ""),  # which all fit into a buffer
        (100_000, "ends", "unread", 141, ""),
        (100_000, "outlives", "unread", 0, ""),
        (5, "ends", "/dev/full", 1, "error: standard output cannot be written (No space left on device)"),
        (5, "outlives", "/dev/full", 0, ""),
        (5, "ends", "closed", 0, ""),
    ],
)
def test_exit_codes_and_words_where_output_is_lost(
    lines: int, outlives: str, output: str, code: int, said: str, unread: int
) -> None:
    command = f"{sys.executable} -c '{GUARDED}' {lines} {outlives}"
    to = {"unread": f">&{unread}", "closed": ">&-"}.get(output, f"> {output}")
    done = subprocess.run(
        ["bash", "-c", f"exec {command} {to}"],
        pass_fds=[unread],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)


CLOSED = """
import os, sys
from fedmpi import __main__, cli
from fedmpi.process import signals

def report(interrupt):
    handle = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
    print("lost", handle, flush=True)
    print("lost", file=sys.stderr)
    os.write(handle, str([handle > 2, interrupt.asked()]).encode())
    return 0

cli.run_command = report
__main__.main()
"""


def test_descriptors_that_the_parent_has_closed_are_not_given_to_pipes_and_files_of_the_run(tmp_path: Path) -> None:
    words = f"exec {sys.executable} -c '{CLOSED}' train {tmp_path / 'closed'} <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", words], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0
    assert (tmp_path / "closed").read_text() == "[True, False]"
