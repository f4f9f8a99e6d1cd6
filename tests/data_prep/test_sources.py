"""Downloads from a local server: checksums, archives, the cache, and addresses that do not answer."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from data_prep.__main__ import fetch
from data_prep.datasets import DATASETS
from data_prep.raw import Source
from fedmpi import UserError


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


def test_a_file_is_fetched_once_and_checked(server: tuple[str, Path], tmp_path: Path) -> None:
    address, served = server
    source = _serve(address, served, "a.bin", b"content" * 1000)
    assert (fetch("set", (source,), tmp_path / "cache") / "a.bin").read_bytes() == b"content" * 1000
    (served / "a.bin").unlink()
    assert (fetch("set", (source,), tmp_path / "cache") / "a.bin").exists()


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_archives_are_unpacked(server: tuple[str, Path], tmp_path: Path, name: str) -> None:
    address, served = server
    source = _serve(address, served, name, _archive(name, {"in/one.txt": b"1", "in/two.txt": b"2"}))
    folder = fetch("set", (source,), tmp_path / "cache")
    assert sorted(path.name for path in folder.rglob("*.txt")) == ["one.txt", "two.txt"]
    folder = fetch("set", (Source(source.url, source.checksum, ("in/one.txt",)),), tmp_path / "other")
    assert [path.name for path in folder.rglob("*.txt")] == ["one.txt"]


def test_a_wrong_checksum_keeps_nothing(server: tuple[str, Path], tmp_path: Path) -> None:
    address, served = server
    source = _serve(address, served, "a.bin", b"content")
    (served / "a.bin").write_bytes(b"another")
    with pytest.raises(UserError, match="does not have the published checksum"):
        fetch("set", (source,), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_missing_file_or_a_dead_address_asks_for_raw(server: tuple[str, Path], tmp_path: Path) -> None:
    address, _ = server
    for url in (f"{address}/missing.bin", "http://127.0.0.1:9/a.bin"):
        with pytest.raises(UserError, match=r"cannot download .* --raw"):
            fetch("set", (Source(url, "md5:" + "0" * 32),), tmp_path / "cache")


def test_every_address_has_a_checksum_of_the_right_length() -> None:
    lengths = {"md5": 32, "sha256": 64}
    for data_set in DATASETS.values():
        for source in data_set.sources:
            kind, digest = source.checksum.split(":")
            assert len(digest) == lengths[kind] and int(digest, 16) >= 0, data_set.name


def _serve(address: str, folder: Path, name: str, content: bytes) -> Source:
    (folder / name).write_bytes(content)
    return Source(f"{address}/{name}", f"sha256:{hashlib.sha256(content).hexdigest()}")


def _archive(name: str, members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(out, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
    else:
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for member, content in members.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()
