"""`fedmpi estimate` through the real command: output, figures and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.cli import app


def estimate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedmpi", "estimate", *arguments]
    environment = {"COLUMNS": "160", "OMP_NUM_THREADS": "1", "PATH": "", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=170, check=False)


def test_every_mechanism_is_assessed_on_the_users_clients_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "errors.png"
    result = estimate(
        "--sizes",
        "digits:clients=30",
        "--epsilon",
        "3",
        "--threshold",
        "300",
        "--wanted",
        "200",
        "--plot",
        str(picture),
    )
    assert result.returncode == 0, result.stderr
    assert "30 clients, 1,442 samples: ε = 3, M = 300, K = 200" in result.stdout
    for word in ("randomized-response", "duchi", "piecewise", "bias", "std", "P(p = 1)", "samples.size.estimate"):
        assert word in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_clipping_is_said_and_only_participants_can_be_asked() -> None:
    result = estimate("--sizes", "digits", "--epsilon", "3", "--threshold", "20", "--participants", "5")
    assert result.returncode == 0, result.stderr
    assert "5 clients, 360 samples" in result.stdout and "K = 36" in result.stdout
    assert "clipped clients: 100.0%" in result.stdout
    assert "raise samples.size.max_size above 20" in result.stdout


def test_wrong_settings_are_rejected_in_one_sentence() -> None:
    for wrong, named in (("0", "samples.size.epsilon"), ("three", "valid number")):
        result = estimate("--sizes", "digits", "--epsilon", wrong, "--threshold", "300")
        assert result.returncode == 2
        assert named in result.stderr and len(result.stderr.splitlines()) == 1


def test_no_samples_no_participants_and_a_picture_that_cannot_be_written_are_rejected(tmp_path: Path) -> None:
    wrong = {
        "--wanted=0": "budget per round is 0",
        "--participants=0": "choose 1 to 20",
        f"--plot={tmp_path / 'errors.abc'}": r"\.png",
        f"--plot={tmp_path / 'missing' / 'errors.png'}": "does not exist",
    }
    for option, named in wrong.items():
        words = ["estimate", "--sizes", "digits", "--epsilon", "3", "--threshold", "300", option]
        with pytest.raises(UserError, match=named) as raised:
            app(words, standalone_mode=False)
        assert len(str(raised.value).splitlines()) == 1
