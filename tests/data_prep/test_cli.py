"""The command line: lists, errors in one sentence, interruptions, full disks, several processes, downloads."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from data_prep import writer
from data_prep.__main__ import fetch, flag
from data_prep.datasets import DATASETS
from data_prep.raw import Source
from fedmpi import UserError, components
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, read_manifest
from tests.data_prep.command import main
from tests.mpi.launch import finish_job, run_mpi, start_job

FORK = multiprocessing.get_context("fork")
Output = pytest.CaptureFixture[str]


def test_list_shows_every_data_set_and_every_partition_with_its_options(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    headings = [line for line in lines if line.partition(" (")[0].isupper()]
    assert [heading.partition(" (")[0] for heading in headings] == ["DATA SETS", "PARTITIONS", "OPTIONS OF DATA SETS"]
    for name, data_set in DATASETS.items():
        assert name in lines
        for source in data_set.sources:
            assert source.url in shown or source.url.rpartition("/")[0] in shown
    for part in components("partition"):
        assert part.name in lines and all(f"    {flag(name)}: " in shown for name in part.fields)
    assert max(map(len, lines)) <= 80 or max(lines, key=len).strip().startswith("http")


IID = "--partition iid --clients 3 --out o"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"mnst {IID}", "no data set 'mnst'; did you mean mnist?"),
        ("digits --partition dirichlt --clients 3 --out o", "did you mean dirichlet?"),
        (f"digits {IID} --alpha 1", "--alpha is no option of digits and iid"),
        ("digits --partition dirichlet --alhpa 1 --clients 3 --out o", "did you mean --alpha?"),
        ("digits --partition dirichlet --clients 3 --out o", "needs --alpha"),
        ("digits --partition iid --out o", "needs the number of clients"),
        ("digits --partition iid --clients 0 --out o", "--clients 0 is impossible"),
        (f"digits {IID} --shards 0", "Invalid value for '--shards'"),
        (f"digits {IID} --val 1", "Invalid value for '--val'"),
        ("digits --partition iid --clients 3", "--out"),
        ("digits --partition user --out o", "names its users"),
        (f"digits {IID} --seed -1", "--seed"),
        (f"digits {IID} --raw .", "digits is built in"),
        (f"mnist {IID}", "where is mnist? give --raw DIR or --download"),
        (f"mnist {IID} --raw . --download", "exclude each other"),
        (f"mnist {IID} --raw missing", "--raw missing does not exist"),
        (f"mnist {IID} --raw .", "no train-images-idx3-ubyte in ."),
        (f"mind {IID} --download", "fetch it by hand (from https://msnews.github.io)"),
        (f"arrays {IID} --raw .", "There is no table in ."),
        ("digits", "Missing option '--partition'"),
    ],
)
def test_wrong_input_is_rejected_with_one_sentence(
    words: str, message: str, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_prepared_folder_is_replaced_only_when_asked(capsys: Output, tmp_path: Path) -> None:
    words = ["digits", "--partition", "dirichlet", "--alpha=0.5", "--by", "client", "--seed", "9"]
    words += ["--out", str(tmp_path / "s s"), "--clients"]
    assert main([*words, "5"]) == 0
    manifest = read_manifest(tmp_path / "s s")
    assert manifest.command == f"python -m data_prep {' '.join(words[:-3])} --out '{tmp_path / 's s'}' --clients 5"
    assert manifest.partition_options["alpha"] == 0.5 and manifest.partition_options["by"] == "client"
    assert (manifest.seed, manifest.clients) == (9, 5)
    assert main([*words, "6"]) == 2 and str(tmp_path / "s s") in capsys.readouterr().err
    assert main([*words, "6", "--overwrite", "--dry-run"]) == 0 and open_store(tmp_path / "s s").clients == 5
    assert main([*words, "6", "--overwrite"]) == 0 and open_store(tmp_path / "s s").clients == 6


def test_vocabulary_and_vectors_are_stored_beside_the_shards(tmp_path: Path, capsys: Output) -> None:
    rows = "".join(f"N{row}\t{'ab'[row % 2]}\t\tword{row % 3} common\t\t\t[]\t[]\n" for row in range(20))
    (tmp_path / "news.tsv").write_text(rows + "broken\n")
    (tmp_path / "glove.txt").write_text("common 1 2\nword1 3 4\n")
    words = ["mind", "--raw", str(tmp_path), "--length", "4", "--vocabulary", "3", "--partition", "iid"]
    words += ["--clients", "4", "--vectors", str(tmp_path / "glove.txt"), "--out", str(tmp_path / "s")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "rows that cannot be read, left out: 1. The first" in shown and "line 21" in shown
    assert "2 of 3 words found" in " ".join(shown.replace("│", " ").split())
    store = open_store(tmp_path / "s")
    assert store.vocabulary == ("<pad>", "<unk>", "common", "word0", "word1")
    assert store.description.vocabulary == 5 and store.client(0)[0].shape[1:] == (4,)
    vectors = np.load(tmp_path / "s" / "vectors.npy")
    assert vectors.dtype == np.float32 and vectors[2:].tolist() == [[1, 2], [0, 0], [3, 4]]
    assert main([*words, "--overwrite", "--strict"]) == 2 and "line 21" in capsys.readouterr().err


# Interruptions and full disks


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_preparation_that_is_ended_is_repeated_by_the_same_command(
    tmp_path: Path, number: signal.Signals, code: int, capfd: Output
) -> None:
    """Ended after the first of 60 shards: no manifest, the folder cannot be read, and the next attempt is whole."""
    words = ["digits", "--partition", "iid", "--clients", "60", "--shards", "60", "--out", str(tmp_path / "s")]
    fill, at_the_third = writer._fill_shard, FORK.Event()

    def stay(plan: Any, first: int, *others: Any) -> Any:
        if first == 2:
            at_the_third.set()
            time.sleep(100)
        return fill(plan, first, *others)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        writer._fill_shard = stay
        sys.exit(main(words))

    process = FORK.Process(target=prepare)
    process.start()
    assert at_the_third.wait(60) and process.pid
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code and ("interrupted: repeat the command" in capfd.readouterr().err) == (code == 130)
    left = {path.name for path in (tmp_path / "s").iterdir()}
    assert MANIFEST not in left and (number == signal.SIGKILL or not left)
    with pytest.raises(UserError, match="interrupted or is still running" if left else "is missing"):
        open_store(tmp_path / "s")
    assert main(words) == 0
    assert open_store(tmp_path / "s", verify=True).clients == 60 and len(list((tmp_path / "s").iterdir())) == 62


WORDS = ["digits", "--partition", "iid", "--clients", "6", "--shards", "3", "--val", "0.1", "--seed", "0", "--out"]
WRITE = os.write


class FullDisk:
    """Writes of HDF5 files that fail from a certain one on, all files counted together."""

    def __init__(self, first_to_fail: int, error: BaseException | None = None):
        self.writes, self.first_to_fail = 0, first_to_fail
        self.error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, file: int, data: bytes) -> int:
        self.writes += os.readlink(f"/proc/self/fd/{file}").endswith(".h5")
        if self.writes >= self.first_to_fail:
            raise self.error
        return WRITE(file, data)


def test_at_whatever_write_the_disk_is_full_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    counting = FullDisk(sys.maxsize)
    monkeypatch.setattr("data_prep.output.os.write", counting.write)
    assert main([*WORDS, str(tmp_path / "whole")]) == 0
    assert counting.writes > 30
    for number in range(1, counting.writes + 1, 13):
        monkeypatch.setattr("data_prep.output.os.write", FullDisk(number).write)
        assert main([*WORDS, str(tmp_path / "out")]) == 2, number
        assert f"writing to {tmp_path / 'out'} failed (No space left on device)" in capsys.readouterr().err
        assert not list((tmp_path / "out").iterdir()), number
    monkeypatch.setattr("data_prep.output.os.write", FullDisk(9, KeyboardInterrupt()).write)
    assert main([*WORDS, str(tmp_path / "out")]) == 130 and not list((tmp_path / "out").iterdir())
    monkeypatch.setattr("data_prep.output.os.write", WRITE)
    assert main([*WORDS, str(tmp_path / "out")]) == 0  # a later preparation takes the folder
    for file in (tmp_path / "whole").glob("*.h5"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_the_program_ends_in_order_on_a_full_disk(tmp_path: Path) -> None:
    """HDF5 tries again at the end of the process to write what it could not, and crashed then."""
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "_", "env", "PYTHONDONTWRITEBYTECODE=1"]
    ended = finish_job(start_job([*limited, sys.executable, "-m", "data_prep", *WORDS, str(tmp_path)]), 100)
    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(said) == 1 and f"writing to {tmp_path} failed (File too large)" in said[0]
    assert not list(tmp_path.iterdir())


def test_the_first_of_several_processes_writes(tmp_path: Path) -> None:
    twice = "import sys; from data_prep.__main__ import main, run; run(sys.argv[1:]); main()"
    ended = run_mpi(2, ["-c", twice, *WORDS, tmp_path / "s"])
    assert ended.returncode == 2 and "--overwrite" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout.count("license") == 2 and ended.stdout.count("Gini") == 1
    assert open_store(tmp_path / "s", verify=True).clients == 6


# Downloads


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a server on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as listener:
        Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_address[1]}", folder
        listener.shutdown()


def source_of(address: str, path: Path, members: tuple[str, ...] = ()) -> Source:
    return Source(f"{address}/{path.name}", f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}", members)


def test_a_file_is_fetched_once_and_checked(server: tuple[str, Path], tmp_path: Path) -> None:
    address, served = server
    (served / "a.bin").write_bytes(b"content" * 1000)
    source = source_of(address, served / "a.bin")
    for folder in ("cache", "cache"):
        assert (fetch("set", (source,), tmp_path / folder) / "a.bin").read_bytes() == b"content" * 1000
        (served / "a.bin").write_bytes(b"another")
    with pytest.raises(UserError, match="does not have the published checksum"):
        fetch("set", (source,), tmp_path / "new")
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    for url in (f"{address}/missing.bin", "http://127.0.0.1:9/a.bin"):
        with pytest.raises(UserError, match=r"cannot download .* --raw"):
            fetch("set", (Source(url, "md5:" + "0" * 32),), tmp_path / "cache")


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_archives_are_unpacked(server: tuple[str, Path], tmp_path: Path, kind: str) -> None:
    address, served = server
    (tmp_path / "raw" / "in").mkdir(parents=True)
    for name in ("one.txt", "two.txt"):
        (tmp_path / "raw" / "in" / name).write_bytes(b"1")
    packed = Path(shutil.make_archive(str(served / "a"), kind, tmp_path / "raw", "in"))
    for members, expected in (((), ["one.txt", "two.txt"]), (("in/one.txt",), ["one.txt"])):
        folder = fetch("set", (source_of(address, packed, members),), tmp_path / str(len(members)))
        assert sorted(path.name for path in folder.rglob("*.txt")) == expected


def test_a_download_that_does_not_fit_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retrieve(*where: object, **options: object) -> None:
        (tmp_path / "unpacked").mkdir()
        (tmp_path / "unpacked" / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with pytest.raises(UserError, match=f"cannot store set.zip in {tmp_path}: No space left on device; make room"):
        fetch("set", (Source("https://example.org/set.zip", "md5:0"),), tmp_path)
    assert not list(tmp_path.iterdir())
