"""Top level of every command: no error on any rank may leave the other ranks waiting.

Exit codes: 0 done, 2 wrong user input, 75 stopped by a signal after saving, 76 MPI did not start (handled by
`fedmpi.mpi.launch`), 141 the output has no reader, 1 anything else.

A run of hours does not end because its output has no reader any more. Ctrl-C, for example, also ends the reader of
`fedmpi train … | tee log` while the run is about to save. Other commands end in this case.
"""

from __future__ import annotations

import faulthandler
import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn
from zlib import crc32

from fedmpi.common.errors import (
    UNWRITABLE,
    ClientFailure,
    ComponentFailure,
    Divergence,
    RanksDisagree,
    RunFailure,
    UserError,
    raised,
)
from fedmpi.mpi import abort_job, agree_on_end, read_launch, start_mpi, world_rank
from fedmpi.process.signals import STOPPED_AFTER_SAVING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DONE, OUR_FAULT, USER_ERROR, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
SECONDS_TO_AGREE = {DONE: None, STOPPED_AFTER_SAVING: 60.0}
SECONDS_TO_AGREE_ON_ERROR = 2.0
ENDS_ALONE = "ends alone with exit code {}"


def run_guarded(main: Callable[[], int | None], joins: bool = True, ignores_lost_output: bool = False) -> NoReturn:
    """Run a command's main function so that an error on one rank ends the whole job."""
    _prepare_streams(ignores_lost_output)
    try:
        launch = read_launch()
        if joins and launch is not None and launch.size > 1:
            start_mpi()  # before anything can fail: only a rank that has joined can end the others
        code, why = main() or DONE, ""
        sys.stdout.flush()
    except BaseException as error:
        code, why, shared = _ending_of(error)
        if isinstance(error, BrokenPipeError) and not ignores_lost_output:
            code, why, shared = UNREAD, "", True
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest of its buffer when it ends
        if not shared:
            _print_error(why)
            abort_job(code)
    sys.exit(_end(code, why))


@contextmanager
def ending_together() -> Iterator[None]:
    """End a job of several ranks at once if an exception in the context is not raised identically on all ranks.

    An exception that all ranks raise, or any in a single process, is raised unchanged without ending the interpreter.
    """
    launch = read_launch()
    if launch is not None and launch.size > 1:
        start_mpi()
    try:
        yield
    except BaseException as error:
        if world_rank() is not None:
            code, why, shared = _ending_of(error)
            if not (shared and _all_end_so(code, why, SECONDS_TO_AGREE_ON_ERROR)):
                _print_error(why or ENDS_ALONE.format(code))
                abort_job(code or OUR_FAULT)
        raise


@contextmanager
def stall_timeout(seconds: float) -> Iterator[Callable[[], None]]:
    """End this rank with exit code 1 when the yielded function is not called for a number of seconds.

    Every rank of a job has its own timer, so each prints the current line of code of all its threads, and the launcher
    ends the job.
    """
    armed = float("-inf")

    def rearm() -> None:
        nonlocal armed
        now = time.monotonic()
        if seconds and now - armed > seconds / 10:  # arming starts a thread
            armed = now
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)

    rearm()
    try:
        yield rearm
    finally:
        if seconds:
            faulthandler.cancel_dump_traceback_later()


def _ending_of(error: BaseException) -> tuple[int, str, bool]:
    """Return the exit code, the message, and whether all ranks may raise the same error."""
    if isinstance(error, SystemExit):
        return (OUR_FAULT, error.code, True) if isinstance(error.code, str) else (error.code or DONE, "", True)
    if isinstance(error, UserError | RanksDisagree | Divergence):
        ours = isinstance(error, RunFailure) or not isinstance(error, UserError)
        return OUR_FAULT if ours else USER_ERROR, f"error: {error}", True
    if isinstance(error, ComponentFailure | ClientFailure):
        cause = error.__cause__
        trace = "".join(traceback.format_tb(cause.__traceback__)) if cause is not None else ""
        lines = error.trace if isinstance(error, ComponentFailure) else trace
        return OUR_FAULT, f"error: {error}\n{lines}".rstrip(), isinstance(error, ComponentFailure)
    if isinstance(error, ImportError):
        return OUR_FAULT, f"error: a package cannot be loaded ({raised(error)}): see `fedmpi doctor`", True
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted", False
    return OUR_FAULT, "".join(traceback.format_exception(error)), False


def _all_end_so(code: int, why: str, limit: float | None) -> bool:
    return agree_on_end(code, crc32(why.encode(errors="backslashreplace")), limit)


def _end(code: int, why: str) -> int:
    if _all_end_so(code, why, SECONDS_TO_AGREE.get(code, SECONDS_TO_AGREE_ON_ERROR)):
        launch = read_launch()
        if why and (launch is None or not launch.rank):
            _write(why)
        elif why and world_rank() is None:
            time.sleep(1)  # MPI did not join the processes: the launcher may end rank 0 with this one
        return code
    if code == DONE:
        return code  # another rank failed, and ends the job
    _print_error(why or ENDS_ALONE.format(code))
    abort_job(code)


def _print_error(text: str) -> None:
    rank = world_rank()
    if rank is None and (launch := read_launch()) is not None and launch.size > 1:
        rank = launch.rank
    if rank is None:
        _write(text.rstrip())
        return
    first, *others = text.rstrip().split("\n")
    _write("\n".join([f"rank {rank} on {socket.gethostname()}: {first}", *(f"rank {rank}: {line}" for line in others)]))


def _write(text: str) -> None:
    with suppress(*UNWRITABLE):  # a closed terminal must not keep the job from ending
        sys.stdout.flush()
        sys.stderr.write(text + "\n")  # in one piece, so that the ranks' lines do not mix
        sys.stderr.flush()


class _Output(io.FileIO):
    """Standard output or error whose reader may go: everything after a failed write is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def _prepare_streams(ignores_lost_output: bool) -> None:
    """Ignore lost standard error, and lost standard output if asked; allow file names that are not UTF-8."""
    for name, descriptor, drops in (("stdout", 1, ignores_lost_output), ("stderr", 2, True)):
        stream = getattr(sys, name)
        if stream is None:  # the parent has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if drops and stream is getattr(sys, f"__{name}__"):  # other code has not replaced it
                os.set_blocking(descriptor, True)  # a launcher or a remote shell may have changed its pipe
                buffer = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
                line_buffering = stream.line_buffering
                setattr(
                    sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=line_buffering)
                )
