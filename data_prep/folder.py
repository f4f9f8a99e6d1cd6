"""The output folder of a preparation: claimed before anything is written, released when the manifest stands."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from data_prep.room import require_room
from fedmpi.common.errors import UserError
from fedmpi.common.files import refuse_unwritable, sync_folder
from fedmpi.data.schema import EXTRAS, MANIFEST, PARTIAL, PREPARING, TEST, VALIDATION, VECTORS, VOCABULARY
from fedmpi.records.hold import FOLDER, Hold

_SINGLE = (TEST, VALIDATION, EXTRAS, VOCABULARY, VECTORS, MANIFEST)
_OWN = re.compile(rf"(train-\d{{5,}}\.h5|{'|'.join(map(re.escape, _SINGLE))})")


def claim(folder: Path, overwrite: bool, needed: int = 0) -> Hold:
    """Make `folder` ready to be written, or refuse.

    An empty or missing folder is taken; one whose preparation was interrupted is cleared of its files; a prepared one
    only with `overwrite`. Files that a preparation does not write are never touched.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse(folder, overwrite)
    except OSError as error:
        raise UserError(f"the output folder {folder} cannot be made ({error.strerror}): choose another --out") from None
    try:
        hold = Hold(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        _refuse(folder, overwrite)  # others may have written before they let go of it
        _clear(folder, needed)
    except OSError as error:
        hold.release()
        raise _unwritable(folder, error) from None
    except BaseException:
        hold.release()
        raise
    return hold


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse what `claim` would, as far as that can be told without writing anything."""
    refuse_unwritable(folder, writing=True)
    if folder.is_dir():
        _refuse(folder, overwrite)


def _refuse(folder: Path, overwrite: bool) -> None:
    present = {path.name for path in folder.iterdir()} - {FOLDER}
    if MANIFEST in present and not overwrite and PREPARING not in present:
        raise UserError(f"{folder} holds a prepared data set already: choose another --out, or add --overwrite")
    if present and MANIFEST not in present and PREPARING not in present:
        other = sorted(present)[0]
        raise UserError(f"{folder} holds something else ({other}): choose an empty or new folder with --out")


def _clear(folder: Path, needed: int) -> None:
    """Mark the folder as one at work, and remove what earlier preparations have left there."""
    ours = own_files(folder)
    require_room(folder, needed, sum(path.stat().st_size for path in ours))
    (folder / PREPARING).touch()
    sync_folder(folder)
    # The manifest goes first: at no moment does it describe files that are gone.
    for path in ours:
        path.unlink()


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"the output folder {folder} cannot be written ({error.strerror}): choose another --out")


def own_files(folder: Path) -> list[Path]:
    """What earlier preparations have left in a folder, whole or not; the manifest first."""
    present = folder.iterdir() if folder.is_dir() else ()
    ours = [path for path in present if _OWN.fullmatch(path.name.removesuffix(PARTIAL))]
    return sorted(ours, key=lambda path: (path.name != MANIFEST, path.name))


def abandon(folder: Path) -> None:
    """Clear the folder of a preparation that failed of all that it wrote."""
    for path in own_files(folder):
        path.unlink(missing_ok=True)
    release(folder)


def release(folder: Path) -> None:
    """Declare the preparation complete."""
    with suppress(FileNotFoundError):
        (folder / PREPARING).unlink()
    sync_folder(folder)
