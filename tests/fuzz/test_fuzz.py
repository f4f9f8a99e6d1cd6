"""Damaged and odd inputs are rejected in a sentence or used rightly; FUZZ_EXAMPLES=3000 tries more of each kind."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpi.config import config_toml, load_config
from fedmpi.config.loading import build_config
from tests.fuzz import checkpoints, parts, raw, shards
from tests.fuzz.damage import Finding, folder_of, outcome

TOMLS = [
    b"\xef\xbb\xbfrounds = 3",
    b"\xff\xfer\x00o\x00",
    b"rounds = 3\r",
    b"rounds = 3\0",
    b"\xff",
    b"rounds = " + b"9" * 4301,
    b"rounds = 0x" + b"f" * 5000,
    b"seed = 1e400",
    b"seed = nan",
    b"seed = 1979-05-27",
    b"a = " + b"[" * 10_000,
    b"a = " + b"{b=" * 2000 + b"1" + b"}" * 2000,
    b"[a." + b"a." * 3000 + b"a]",
    b"[local]\nlr = 0.2\nlr = 0.2",
    b"local.lr = 1\nlocal = 2",
    b"[[local]]\nlr = 0.1",
    b"local = 5",
    b'"rounds" = 3',
    b'"" = 3',
    b"'local.lr' = 1",
    b'[data]\nsource = "\\u0000"',
    b"preset = []",
    b'preset = "../x"',
    b'preset = "' + b"x" * 5000 + b'"',
    b"[model]\n" + b"\n".join(b"k%d = %d" % (i, i) for i in range(3000)),
    b"rounds = 3.0",
    b"[clients]\ncount = 1_000_000_000_000_000_000_000",
    b"\xe2\x80\xa8rounds = 3",
]


def read_toml(content: bytes) -> str:
    """Reject the input, or return a configuration that is the same when it is written and read again."""
    path: Path = folder_of("toml")[0] / "c.toml"
    path.write_bytes(content)
    found = outcome(lambda: load_config(path))
    if isinstance(found, str):
        return found
    if outcome(lambda: build_config([("again", tomllib.loads(config_toml(found)))])) != found:
        raise Finding("the configuration as it is written is another one")
    return "read"


def texts() -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(TOMLS) | st.binary(max_size=12), min_size=1, max_size=3).map(b"\n".join)


TEXTS = SimpleNamespace(attempt=read_toml, strategy=texts)
EXAMPLES: dict[str, tuple[ModuleType | SimpleNamespace, int]] = {
    "shards": (shards, 40),
    "checkpoints": (checkpoints, 40),
    "raw": (raw, 30),
    "components": (parts, 12),
    "texts": (TEXTS, 60),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_any_input_is_rejected_in_a_sentence_or_used_rightly(kind: str) -> None:
    module, examples = EXAMPLES[kind]
    wanted = os.environ.get("FUZZ_EXAMPLES")

    @settings(
        max_examples=int(wanted or examples),
        deadline=None,
        database=None,
        derandomize=wanted is None,
        suppress_health_check=list(HealthCheck),
    )
    @given(module.strategy())
    def try_one(case: object) -> None:
        module.attempt(case)

    try_one()


@pytest.mark.parametrize("content", TOMLS, ids=lambda content: str(content[:20]))
def test_odd_files_are_no_configuration_or_a_whole_one(content: bytes) -> None:
    read_toml(content)
