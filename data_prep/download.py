"""Downloads from official addresses: once, on request only, checked against a published checksum."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pooch
import requests

from fedmpi.common.errors import UserError

UNPACKED = "unpacked"
ARCHIVES = (".zip", ".tar.gz", ".tar.bz2", ".tgz")


@dataclass(frozen=True)
class Source:
    """One file at its official address."""

    url: str  # The address
    checksum: str  # "sha256:..." or "md5:...", as published
    members: tuple[str, ...] = ()  # Files to extract from an archive; empty extracts all

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return Path(urlsplit(self.url).path).name


def cache_folder(name: str) -> Path:
    """Return the cache folder of a data set: $DATA_PREP_CACHE/name, else the user's cache folder."""
    root = os.environ.get("DATA_PREP_CACHE")
    return Path(root).expanduser() / name if root else Path(pooch.os_cache("data_prep")) / name


def fetch(name: str, sources: tuple[Source, ...], folder: Path | None = None) -> Path:
    """Download the files of a data set unless they are cached, check them and unpack the archives."""
    target = folder or cache_folder(name)
    for source in sources:
        unpack = pooch.Unzip if source.filename.endswith(".zip") else pooch.Untar
        packed = source.filename.endswith(ARCHIVES)
        try:
            pooch.retrieve(
                source.url,
                source.checksum,
                fname=source.filename,
                path=target,
                processor=unpack(members=list(source.members) or None, extract_dir=UNPACKED) if packed else None,
                downloader=pooch.HTTPDownloader(timeout=30),
            )
        except requests.exceptions.RequestException as error:
            reason = type(error).__name__
            raise UserError(
                f"cannot download {source.url} ({reason}); fetch it by hand into a folder and pass that with --raw"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{source.url} does not have the published checksum {source.checksum}; nothing was kept, try again or "
                "fetch it by hand and pass the folder with --raw"
            ) from error
        except OSError as error:
            shutil.rmtree(target / UNPACKED, ignore_errors=True)  # a partial file would later pass as complete
            raise UserError(
                f"cannot store {source.filename} in {target}: {error.strerror or error}; make room there, or set "
                "DATA_PREP_CACHE to another folder"
            ) from error
    return target
