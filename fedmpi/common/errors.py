"""Errors that are shown to the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

LONGEST_SENTENCE, LONGEST_VALUE = 2000, 200
"""Characters of an error, and of a value in it, above which the middle is left out."""
UNWRITABLE = (OSError, ValueError, AttributeError)
"""Errors of writing to a standard stream that is missing, closed, full, or has no reader."""


class UserError(Exception):
    """Wrong user input: one clear sentence with the problem, its place and a remedy. The commands exit with 2.

    It is one line of limited length, whatever input it quotes.
    """

    def __init__(self, sentence: str):
        super().__init__(on_one_line(sentence, LONGEST_SENTENCE))


def on_one_line(text: str, most: int = LONGEST_SENTENCE) -> str:
    """Return a text without line breaks and other control characters; the middle of a long text is left out."""
    line = "".join(" " if character < " " or "\x7f" <= character < "\xa0" else character for character in text)
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def shown(value: Any, written: Callable[[Any], str] = str) -> str:
    """Return a user's value as text for an error."""
    try:
        return on_one_line(written(value), LONGEST_VALUE)
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"


def suggestion(name: str, names: Iterable[str], otherwise: str, cutoff: float = 0.4) -> str:
    """Return the nearest of the known names as a question; other advice if none is near."""
    near = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def raised(error: BaseException) -> str:
    """Return the type and text of an exception on one line; the text of some exceptions cannot be read."""
    try:
        return on_one_line(f"{type(error).__name__}: {error}")
    except Exception as failed:
        return f"{type(error).__name__}, which cannot be written ({type(failed).__name__})"


class RunFailure(UserError):
    """External failure of a run, such as a full disk: the problem, its place and a remedy. Exit code 1."""


class RanksDisagree(Exception):
    """Error if the ranks of a job do not do the work of one run; all of them raise it. The commands exit with 1."""


class Divergence(FloatingPointError):
    """Numbers left the range in which anything is learned; a sentence with advice. The commands exit with 1."""


class ClientFailure(Exception):
    """Exception inside the work of one client; it names the client and the rank.

    Parameters
    ----------
    client : int
        Index of the client in the shard folder.
    rank : int
        MPI rank that trained the client.
    cause : BaseException
        Original exception.
    where : str
        The failing line of the user's code, "file:line"; "" if there is none.
    round : int, optional
        Round of the failure.
    """

    def __init__(self, client: int, rank: int, cause: BaseException, where: str = "", round: int | None = None):
        place = ", ".join([*([where] if where else []), *([] if round is None else [f"round {round}"])])
        super().__init__(f"client {client} on rank {rank}: {raised(cause)}{f' ({place})' if place else ''}")
        self.client, self.rank, self.round, self._given = client, rank, round, (client, rank, cause, where)

    def during(self, round: int) -> ClientFailure:
        """Return the same failure with the round, unless it names one already."""
        return ClientFailure(*self._given, self.round if self.round is not None else round)


class ComponentFailure(Exception):
    """Exception raised by a chosen component, or an invalid result of it. The commands exit with 1.

    Parameters
    ----------
    kind, name : str
        Kind and name of the component.
    problem : str
        The exception, or the defect of the result.
    where : str
        File and line; "" if there is none.
    trace : str
        The component's own lines of the traceback.
    round, client : int, optional
        Round and client of the call.
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

    def during(self, round: int | None = None, client: int | None = None) -> ComponentFailure:
        """Return the same failure with the round and the client, unless it names them already."""
        round = self.round if self.round is not None else round
        client = self.client if self.client is not None else client
        return ComponentFailure(self.kind, self.name, self.problem, self.where, self.trace, round, client)
