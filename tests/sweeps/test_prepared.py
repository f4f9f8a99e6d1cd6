"""Messages of a sweep about a preparation that failed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.common.errors import MissingFiles, RunFailure
from fedmpi.process.children import TAIL, last_words
from fedmpi.sweeps.shards import Preparation, ensure_shards


def test_folders_that_cannot_be_prepared_are_rejected_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("digits", "--partition", "iid", "--clients", "6", "--shards", "2")
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    for place, said in (
        ("file", "no folder"),
        ("file/below", "no folder"),
        ("full", r"something else \(letter.txt\)"),
    ):
        with pytest.raises(UserError, match=rf"^\[prepare\] for digits: .*{said}"):
            Preparation("", tmp_path / place, words).check()
    unread = ("mnist", "--partition", "iid", "--clients", "6", "--raw", "nowhere")
    with pytest.raises(UserError, match=r"^\[prepare\] for mnist: .*something else") as raised:
        Preparation("", tmp_path / "full", unread).check()
    assert not isinstance(raised.value, MissingFiles), "which would not stop --dry-run"
    wanted = Preparation("", tmp_path / "shards", words)
    wanted.check()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)  # root may do all
        with pytest.raises(UserError, match=rf"^\[prepare\] for digits: .* \({tmp_path} may not be written\)"):
            wanted.check()
    ensure_shards(wanted, print, lambda: False)
    answers = iter((False, True))
    monkeypatch.setattr(Preparation, "ready", lambda self: next(answers))
    wanted.check()
    assert next(answers, None) is None, "rejected as prepared already, by another process meanwhile"


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("kill -KILL $$", "ended by SIGKILL"),
        ("kill -35 $$", "ended by signal 35"),
        ("exit 7", "exit code 7"),
        ("echo fedmpi: error: the disk is full; exit 1", "the disk is full"),
        ("echo error: no such option; exit 2", "no such option"),
        ("echo error: the disk is full; echo it ends; exit 1", "the disk is full"),
    ],
)
def test_a_failed_preparation_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, said: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho cite: not stated\n{ending}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    wanted = Preparation("even", tmp_path / "shards", ("digits", "--partition", "iid"))
    with pytest.raises((UserError, RunFailure)) as failure:
        ensure_shards(wanted, print, lambda: False)
    if ending.endswith("exit 2"):
        assert failure.type is UserError and str(failure.value) == f"[prepare] for even: {said}"
    else:
        assert failure.type is RunFailure and f"failed ({said}): see" in str(failure.value)


@pytest.mark.parametrize(
    ("text", "error", "last"),
    [
        ("error: first\n" + "x" * TAIL + "\nlast\n", "", "last"),
        ("error: first\n" + "x" * (TAIL - 50) + "\nlast\n\n \n", "first", "first"),
        ("error: first\nerror: second (error: 5)\nlast\n", "second (error: 5)", "second (error: 5)"),
        ("\udcff\nlast\n\n \n", "", "last"),
        (None, "", "it said nothing"),
    ],
)
def test_the_last_error_in_the_end_of_a_log_is_what_it_says(
    tmp_path: Path, text: str | None, error: str, last: str
) -> None:
    if text is not None:
        (tmp_path / "log").write_bytes(text.encode(errors="surrogateescape"))
    assert last_words(tmp_path / "log") == error and last_words(tmp_path / "log", any_line=True) == last
