"""The errors that speak to the user."""

from __future__ import annotations


class UserError(Exception):
    """The user's input is wrong: one clear sentence saying what, where and what to do. The commands exit with 2."""


class RanksDisagree(Exception):
    """The ranks of a job do not do the work of one run: a sentence that all of them raise. The commands exit with 1."""


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
    """

    def __init__(self, client: int, rank: int, cause: BaseException):
        super().__init__(f"client {client} on rank {rank}: {type(cause).__name__}: {cause}")
        self.client = client
        self.rank = rank
