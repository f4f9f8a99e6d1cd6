"""What an input may lead to: a sentence for the user, or a result. Everything else is a finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.errors import LONGEST_SENTENCE

Result = TypeVar("Result")
REFUSED = "refused"
DIVERGED = ("diverge", "not finite", "overflow")


class Finding(AssertionError):
    """An input that was neither refused in a sentence nor used rightly."""


def outcome(use: Callable[[], Result], failures: bool = False) -> Result | str:
    """What comes of an input: the result, or `REFUSED`."""
    try:
        return use()
    except UserError as error:
        check_sentence(str(error))
        return REFUSED
    except ComponentFailure as error:
        if failures:
            return REFUSED
        raise Finding(f"a built-in part failed: {error}") from error
    except ClientFailure as error:
        if failures or any(word in str(error) for word in DIVERGED):
            return REFUSED
        raise Finding(f"a client failed: {error}") from error
    except Finding:
        raise
    except BaseException as error:
        raise Finding(f"{type(error).__name__}: {error}") from error


def check_sentence(text: str) -> None:
    """One line, long enough to say something, short enough to be read."""
    if "\n" in text or not 20 <= len(text) <= LONGEST_SENTENCE + 3:
        raise Finding(f"this is no sentence: {text!r}")
