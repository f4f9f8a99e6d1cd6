"""Bytes that coverage leads to: atheris (libFuzzer for Python) changes them so that new lines are reached.

    pip install atheris
    python -m tests.fuzz.guided 600                      # seconds for each reader
    python -m tests.fuzz.guided 600 config checkpoint    # of these readers only

Each reader runs in a process of its own: libFuzzer ends it. Exit code 1 where there is a finding.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

MODULES = ["fedmpi.config", "fedmpi.jobs", "fedmpi.records", "fedmpi.data.schema", "data_prep.datasets", "tomllib"]
"""Whose lines count as reached."""
MEGABYTES = 4096
TAG = "fuzz-"

Reader = tuple[Callable[[bytes], object], list[bytes]]
"""Uses the bytes, and what it begins with."""


def config(folder: Path) -> Reader:
    """The file of a configuration."""
    from fedmpi.config import config_toml, load_config
    from tests.fuzz.texts import TOMLS
    from tests.fuzz.verdict import outcome

    def read(content: bytes) -> None:
        (folder / "c.toml").write_bytes(content)
        outcome(lambda: load_config(folder / "c.toml"))

    return read, [config_toml(load_config(None, ["preset=scaffold"])).encode(), *TOMLS[:12]]


def site(folder: Path) -> Reader:
    """The settings of a site."""
    from fedmpi.jobs.site import load_site
    from tests.fuzz.verdict import outcome

    def read(content: bytes) -> None:
        (folder / "site.toml").write_bytes(content)
        outcome(lambda: load_site(folder / "site.toml", gpus=True))

    return read, [b'launcher = "mpiexec {ranks}"\nmodules = ["a"]\n[gpu]\npartition = "gpu"\ncpus_per_rank = 8\n']


def manifest(folder: Path) -> Reader:
    """The manifest of a folder of shards."""
    from data_prep.__main__ import run as data_prep
    from fedmpi.data.schema import read_manifest
    from tests.fuzz.verdict import outcome

    data_prep(["digits", "--partition", "iid", "--clients", "3", "--shards", "2", "--out", str(folder / "shards")])
    path = folder / "shards" / "manifest.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        outcome(lambda: read_manifest(path.parent))

    return read, [path.read_bytes()]


def checkpoint(folder: Path) -> Reader:
    """The header of a checkpoint, under a checksum that agrees with it."""
    from fedmpi.records.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
    from tests.fuzz.checkpoints import METADATA, TENSORS, _metadata
    from tests.fuzz.verdict import outcome

    before, newest = (save_checkpoint(folder, Checkpoint(number, TENSORS, {}), 3) for number in (5, 10))
    kept = before.read_bytes()

    def read(content: bytes) -> None:
        before.write_bytes(kept)
        _metadata(newest, content.decode("utf-8", "replace"))
        outcome(lambda: newest_checkpoint(folder))
        for path in folder.glob("*.damaged"):
            path.unlink()

    return read, [
        b'{"next_round": 10, "settled": 9, "unsettled": {"round": 9}, "data": "d"}',
        *map(str.encode, METADATA),
    ]


READERS: dict[str, Callable[[Path], Reader]] = {
    "config": config,
    "site": site,
    "manifest": manifest,
    "checkpoint": checkpoint,
}


def main(seconds: int, names: list[str]) -> int:
    """Fuzz every reader; tells what libFuzzer counted in the end."""
    found = 0
    for name in names or READERS:
        words = [sys.executable, "-m", "tests.fuzz.guided", str(seconds), TAG + name]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        summary = [line for line in done.stderr.splitlines() if "DONE" in line or "Done" in line]
        print(
            name, *(summary if done.returncode == 0 else [f"FINDING\n{done.stdout}{done.stderr[-4000:]}"]), flush=True
        )
        found |= done.returncode != 0
    return found


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one reader in this process, which libFuzzer ends."""
    import atheris

    with TemporaryDirectory(prefix="fedmpi-guided-") as place:
        folder = Path(place)
        with atheris.instrument_imports(include=MODULES, enable_loader_override=False):
            read, seeds = READERS[name](folder)
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / str(number)).write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-timeout=60", f"-rss_limit_mb={MEGABYTES}", f"-max_len={1 << 16}"]
        sys.stdout = io.StringIO()
        atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", f"-artifact_prefix={place}/", str(corpus)], read)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    time, *wanted = sys.argv[1:]
    if wanted and wanted[0].startswith(TAG):
        fuzz(wanted[0].removeprefix(TAG), int(time))
    else:
        sys.exit(main(int(time), wanted))
