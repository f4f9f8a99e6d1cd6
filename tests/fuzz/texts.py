"""TOML files themselves, the site's settings, jobs that are asked for: whatever the text, one sentence or a script."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hypothesis import strategies as st

from fedmpi.config import config_toml, load_config
from fedmpi.config.loading import build_config
from fedmpi.jobs.site import Site, load_site
from fedmpi.jobs.submission import prepare_submission
from tests.fuzz.verdict import REFUSED, Finding, outcome

Case = tuple[str, Any]
NASTY = [
    "",
    " ",
    "\n",
    "a\nb",
    "'",
    '"',
    "`id`",
    "$(id)",
    "$HOME",
    ";true",
    "%a",
    "%",
    "%j",
    "{",
    "{}",
    "{ranks}",
    "\\",
]
NASTY += [
    "é",
    "\udcff",
    "\0",
    "x" * 5000,
    "-x",
    "--",
    "#SBATCH --x",
    "~",
    "../..",
    "[/x]",
    "\x1b[2J",
    "{0}",
    "{a.b}",
    "!",
]
KEYS = [*Site.model_fields, "gpu", "nothing", ""]
VALUES: list[Any] = [*NASTY, 0, -1, 1, 64, 10**30, 1.5, True, [], ["a"], [1], [[]], {}, ["a\nb"], ["--x"], ["x"] * 3000]
TOMLS = [
    b"",
    b"\xef\xbb\xbfrounds = 3",
    b"\xff\xfer\x00o\x00",
    b"rounds = 3\r\n",
    b"rounds = 3\r",
    b"rounds = 3\0",
    b"\xff",
    b"rounds = " + b"9" * 4301,
    b"rounds = 0x" + b"f" * 5000,
    b"seed = 1e400",
    b"seed = nan",
    b"seed = 1979-05-27",
    b"a = " + b"[" * 10_000 + b"]" * 10_000,
    b"a = " + b"{b=" * 2000 + b"1" + b"}" * 2000,
    b"[a." + b"a." * 3000 + b"a]",
    b"[local]\nlr = 0.2\nlr = 0.2",
    b"local.lr = 1\nlocal = 2",
    b"[[local]]\nlr = 0.1",
    b"local = 5",
    b"rounds = 3 # " + b"x" * 100_000,
    b'"rounds" = 3',
    b'"" = 3',
    b"'local.lr' = 1",
    b'[data]\nsource = "\\u0000"',
    b'[data]\nsource = "\\U0010ffff"',
    b"preset = 5",
    b"preset = []",
    b'preset = "../x"',
    b'preset = "' + b"x" * 5000 + b'"',
    b"[model]\n" + b"\n".join(b"k%d = %d" % (i, i) for i in range(3000)),
    b"rounds = true",
    b'rounds = "3"',
    b"rounds = 3.0",
    b"[clients]\ncount = 1_000_000_000_000_000_000_000",
    b"[local]\nlr = 00.1",
    b"\xe2\x80\xa8rounds = 3",
]
FOLDER = Path(gettempdir()) / f"fedmpi-fuzz-texts-{os.getpid()}"


def strategy() -> st.SearchStrategy[Case]:
    """A TOML file of a run or of a site, or what `fedmpi submit` is told."""
    pieces = st.lists(st.sampled_from(TOMLS) | st.binary(max_size=12), min_size=1, max_size=3)
    damage = st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=4))
    table = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES), max_size=3)
    numbers = st.sampled_from([-1, 0, 1, 2, 10**6, 2**31, 10**30])
    times = st.sampled_from(["1", "10", "1:00:00", "1-0", "0", "-1", "99999999999", "1:99", "", "x", "1-1:1:1", "٣"])
    arrays = st.sampled_from(
        ["", "0-3", "3-0", "0-1000000000", "1,2", "0-8:0", "%", "x", "0-3%2", ",", "-1", "0-3:99999"]
    )
    job = st.fixed_dictionaries(
        {
            "settings": st.lists(
                st.sampled_from(["preset=fedavg", "seed=%a", "seed=%a%a", *(f"model.name={text}" for text in NASTY)]),
                max_size=3,
            ),
            "out": st.sampled_from([*NASTY, "run", "run-%a", "/tmp/x"]),
            "nodes": numbers,
            "ranks_per_node": numbers,
            "gpus_per_node": numbers,
            "time": times,
            "array": arrays,
        }
    )
    return st.one_of(
        st.tuples(st.just("config"), st.tuples(pieces, damage)),
        st.tuples(st.just("site"), table),
        st.tuples(st.just("job"), st.tuples(job, table)),
        st.tuples(st.just("good job"), st.tuples(st.sampled_from(NASTY), st.sampled_from(NASTY), table)),
    )


def attempt(case: Case) -> str:
    """Refused, or a configuration that can be written, settings, or a script that bash can read."""
    kind, how = case
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "config" / "fedmpi").mkdir(parents=True)
    os.environ["XDG_CONFIG_HOME"] = str(FOLDER / "config")
    try:
        return str(globals()[f"_{kind.replace(' ', '_')}"](how))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def _config(how: Any) -> str:
    pieces, (where, written) = how
    content = b"\n".join(pieces)
    place = int(where * len(content))
    path = FOLDER / "c.toml"
    path.write_bytes(content[:place] + written + content[place:])
    found = outcome(lambda: load_config(path))
    if isinstance(found, str):
        return found
    again = outcome(lambda: build_config([("again", tomllib.loads(config_toml(found)))]))
    if again != found:
        raise Finding("the configuration as it is written is another one")
    return "read"


def _written(table: dict[str, Any]) -> Path:
    """A site's settings as TOML, by hand: some hold what no writer would write."""
    path = FOLDER / "config" / "fedmpi" / "site.toml"
    lines = [f"{_toml(key)} = {_toml(value)}" for key, value in table.items()]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\0", "\\u0000")
        return '"' + escaped.replace("\x1b", "\\u001b") + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "{}" if isinstance(value, dict) else str(value).lower()


def _site(table: dict[str, Any]) -> str:
    path = _written(table)
    found = [outcome(lambda gpus=gpus: load_site(path, gpus)) for gpus in (False, True)]
    return REFUSED if REFUSED in found else "read"


def _good_job(how: Any) -> str:
    """A job with nothing wrong but two texts, one in a setting and one in the folder's name."""
    setting, out, table = how
    job = {"settings": ["preset=fedavg", f"data.source=digits:clients=6,seed=1{setting}"], "out": f"run{out}"}
    return _job(({**job, "nodes": 2, "ranks_per_node": 3, "gpus_per_node": 1, "time": "10:00", "array": ""}, table))


def _job(how: Any) -> str:
    job, table = how
    _written(table | ({} if "mpi" in table else {"mpi": "mpich"}))
    ready = outcome(lambda: prepare_submission(None, **{**job, "out": Path(job["out"])}))
    if isinstance(ready, str):
        return ready
    try:
        script = ready.script.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise Finding(f"the script cannot be written: {error}") from error
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, check=False)
    if checked.returncode or checked.stderr:
        raise Finding(f"bash cannot read the script: {checked.stderr.decode(errors='replace')}")
    for setting in job["settings"]:
        if "%a" not in setting and shlex.quote(f"{setting}") not in ready.script and setting not in ready.script:
            raise Finding(f"the script lost {setting!r}")
    if any((FOLDER.parent / "injected").exists() for _ in "x"):
        raise Finding("a command of the settings was run")
    return "script"
