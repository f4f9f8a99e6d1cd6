"""The errors that speak to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LONGEST_SENTENCE, LONGEST_VALUE = 2000, 200
"""Characters of an error, and of a value in it, beyond which the middle is left out."""
UNWRITABLE = (OSError, ValueError, AttributeError)
"""What writing to a standard stream raises whose end is gone or full, that is closed, or that there is none of."""


class UserError(Exception):
    """The user's input is wrong: one clear sentence saying what, where and what to do. The commands exit with 2.

    It stays on one line, and of a bearable length, whatever the input that it quotes.
    """

    def __init__(self, sentence: str):
        super().__init__(on_one_line(sentence, LONGEST_SENTENCE))


def on_one_line(text: str, most: int = LONGEST_SENTENCE) -> str:
    """A text without line breaks and other control characters, its middle left out where it is long."""
    line = "".join(" " if character < " " or "\x7f" <= character < "\xa0" else character for character in text)
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def shown(value: Any, written: Callable[[Any], str] = str) -> str:
    """A value of the user's in an error."""
    try:
        return on_one_line(written(value), LONGEST_VALUE)
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"


def raised(error: BaseException) -> str:
    """The type of an exception and what it says, on one line; some cannot even be asked.

    Of an attribute that one of fedmpi's own objects lacks it tells those that there are.
    """
    try:
        return on_one_line(f"{type(error).__name__}: {error}{_attributes(error)}")
    except Exception as failed:
        return f"{type(error).__name__}, which cannot be written ({type(failed).__name__})"


def _attributes(error: BaseException) -> str:
    """What else could have been asked of the object of ours that lacks an attribute; "" of other errors."""
    if not isinstance(error, AttributeError) or type(error.obj).__module__.partition(".")[0] != "fedmpi":
        return ""
    if str(error) != f"{type(error.obj).__name__!r} object has no attribute {error.name!r}":
        return ""  # its own words, or those of a property within which something was not found
    return f" (it has {', '.join(name for name in dir(error.obj) if not name.startswith('_'))})"


class MissingFiles(UserError):
    """Files of the user's that something will read are not there (yet)."""


class RunFailure(UserError):
    """A run cannot go on for a reason outside of it, such as a full disk: what, where, what to do. Exit code 1."""


class RanksDisagree(Exception):
    """The ranks of a job do not do the work of one run: a sentence that all of them raise. The commands exit with 1."""


class Divergence(FloatingPointError):
    """Numbers left the range in which anything is learned: a sentence with the advice. The commands exit with 1."""


class ClientFailure(Exception):
    """An exception inside the work of one client; names the client and the rank.

    Parameters
    ----------
    client : int
        Index of the client in the shard folder.
    rank : int
        The MPI rank that trained it.
    cause : BaseException
        What went wrong.
    where : str
        The user's own line in which it did, "file:line"; "" where there is none.
    round : int, optional
        In which it did, where `cause` does not say so itself.
    """

    def __init__(self, client: int, rank: int, cause: BaseException, where: str = "", round: int | None = None):
        place = ", ".join([*([where] if where else []), *([] if round is None else [f"round {round}"])])
        super().__init__(f"client {client} on rank {rank}: {raised(cause)}{f' ({place})' if place else ''}")
        self.client = client
        self.rank = rank


class PartFailure(Exception):
    """A part of the user's choice raised an exception, or returned what cannot be used. The commands exit with 1.

    Parameters
    ----------
    kind, name : str
        Of the part.
    problem : str
        The exception, or what is wrong with the result.
    where : str
        File and line; "" where there is none.
    trace : str
        The part's own lines of the traceback.
    round, client : int, optional
        What it was called for.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        problem: str,
        where: str = "",
        trace: str = "",
        round: int | None = None,
        client: int | None = None,
    ):
        called = [f"round {round}"] * (round is not None) + [f"client {client}"] * (client is not None)
        place = f" ({where})" if where else ""
        moment = f" in {', '.join(called)}" if called else ""
        super().__init__(f"the {kind} {name}{place} failed{moment}: {problem}")
        self.kind, self.name, self.problem, self.where, self.trace = kind, name, problem, where, trace
        self.round, self.client = round, client

    def during(self, round: int | None = None, client: int | None = None) -> PartFailure:
        """The same failure, told with the round and the client where it does not name them yet."""
        round = self.round if self.round is not None else round
        client = self.client if self.client is not None else client
        return PartFailure(self.kind, self.name, self.problem, self.where, self.trace, round, client)
